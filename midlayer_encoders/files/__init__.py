"""Write files atomically, read them back, and read text files that users provide."""

from __future__ import annotations

from midlayer_encoders.files.artifacts import (
    LOCK,
    atomic_write,
    check_links,
    explain_full_disk,
    folder_lock,
    make_folder,
    read_artifact,
    remove_leftovers,
    scratch,
    set_aside,
    write_file,
    write_file_once,
    write_folder,
)
from midlayer_encoders.files.text_files import (
    check_regular_file,
    exists,
    expand_home,
    parse_json_object,
    read_json_lines,
    read_lines,
    read_text_file,
)

__all__ = [
    "LOCK",
    "atomic_write",
    "check_links",
    "check_regular_file",
    "exists",
    "expand_home",
    "explain_full_disk",
    "folder_lock",
    "make_folder",
    "parse_json_object",
    "read_artifact",
    "read_json_lines",
    "read_lines",
    "read_text_file",
    "remove_leftovers",
    "scratch",
    "set_aside",
    "write_file",
    "write_file_once",
    "write_folder",
]
