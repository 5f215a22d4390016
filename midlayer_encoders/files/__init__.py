"""Files: those that are kept and read again, and those of text that people bring."""

from __future__ import annotations

from midlayer_encoders.files.kept import (
    LOCK,
    beside,
    check_links,
    clear_left,
    folder_lock,
    lock,
    make_folder,
    naming_a_full_disk,
    read_kept,
    scratch,
    set_aside,
    write_file,
    write_file_once,
    write_folder,
)
from midlayer_encoders.files.lines import (
    at_home,
    check_ordinary,
    exists,
    json_object,
    json_rows,
    read_lines,
    read_whole,
)

__all__ = [
    "LOCK",
    "at_home",
    "beside",
    "check_links",
    "check_ordinary",
    "clear_left",
    "exists",
    "folder_lock",
    "json_object",
    "json_rows",
    "lock",
    "make_folder",
    "naming_a_full_disk",
    "read_kept",
    "read_lines",
    "read_whole",
    "scratch",
    "set_aside",
    "write_file",
    "write_file_once",
    "write_folder",
]
