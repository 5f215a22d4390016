"""Folders with a tiny model and its processor, as users have them on disk."""

import string
import tempfile
from collections.abc import Callable
from pathlib import Path

from tests.support.families import FAMILIES, VOCAB, tiny, tiny_joint

Folder = Callable[[str], str]
"""From the name of a family to the folder of its tiny model: the fixture ``tiny_folder``."""
TEXTS = [
    "the cat sat on the mat",
    "a cat is sitting on a mat",
    "stock markets fell sharply today",
    "shares dropped on Wall Street",
    "how do I reset my card pin?",
    "short",
]


def tokenizer(pad: bool = True):  # type: ignore[no-untyped-def]
    """Return a character tokenizer without special tokens around a text: 95 characters and 4 tokens."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens = ["[PAD]", "[UNK]", "[EOS]", "[BOS]", *string.printable[:95]]
    assert len(tokens) == VOCAB
    word_tokenizer = Tokenizer(
        models.WordLevel({token: position for position, token in enumerate(tokens)}, unk_token="[UNK]")
    )
    word_tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    names = {"unk_token": "[UNK]", "eos_token": "[EOS]", "bos_token": "[BOS]"} | ({"pad_token": "[PAD]"} if pad else {})
    return PreTrainedTokenizerFast(tokenizer_object=word_tokenizer, model_max_length=64, **names)


def processor(name: str, pad: bool = True):  # type: ignore[no-untyped-def]
    """Return the named family's processor: a tokenizer, an image processor or a feature extractor."""
    import transformers as tf

    edge, square = {"shortest_edge": 16}, {"height": 16, "width": 16}
    colors = [[r / 4 - 1, g / 4 - 1, b / 4 - 1] for r in (0, 3, 5, 8) for g in (0, 2, 4, 6, 8) for b in (1, 3, 4, 5, 7)]
    processors = {
        "BEiT": lambda: tf.BeitImageProcessorPil(size=square, do_center_crop=False),
        "DINOv2": lambda: tf.BitImageProcessorPil(size=edge, crop_size=square),
        "CLIPVision": lambda: tf.CLIPImageProcessorPil(size=edge, crop_size=square),
        "AIMv2": lambda: tf.CLIPImageProcessorPil(size=edge, crop_size=square),
        "SigLIP": lambda: tf.SiglipImageProcessorPil(size=square),
        "ImageGPT": lambda: tf.ImageGPTImageProcessorPil(clusters=colors[: VOCAB - 1], size={"height": 4, "width": 4}),
        "Whisper": lambda: tf.WhisperFeatureExtractor(feature_size=8, chunk_length=1, hop_length=400, n_fft=400),
    }
    match FAMILIES[name].modality:
        case "image" | "pixels":
            return _as_loaded(processors.get(name, lambda: tf.ViTImageProcessorPil(size=square))())
        case "mel":
            return processors[name]()
        case "audio":
            return tf.Wav2Vec2FeatureExtractor()
        case _:
            return tokenizer(pad)


def _as_loaded(processor):  # type: ignore[no-untyped-def]
    """Return the image processor as loaded from a folder: with torchvision installed, it resizes differently from PIL."""
    from transformers import AutoImageProcessor

    with tempfile.TemporaryDirectory() as folder:
        processor.save_pretrained(folder)
        return AutoImageProcessor.from_pretrained(folder)


def joint_image_processor():  # type: ignore[no-untyped-def]
    """Return the image processor of a joint model."""
    import transformers as tf

    return _as_loaded(tf.CLIPImageProcessorPil(size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16}))


def save_tiny(name: str, folder: Path, *, pad: bool = True, seed: int = 0) -> str:
    """Write the named family's tiny model and its processor to ``folder``, and return the path."""
    tiny(name, seed).save_pretrained(folder)  # type: ignore[operator]
    processor(name, pad).save_pretrained(folder)
    return str(folder)


def save_joint(name: str, folder: Path) -> str:
    """Write the named joint model and its processor to ``folder``, and return the path."""
    import transformers as tf

    tiny_joint(name).save_pretrained(folder)  # type: ignore[operator]
    if name == "SigLIP2":  # its images are lists of patches
        tf.Siglip2Processor(tf.Siglip2ImageProcessorPil(), tokenizer()).save_pretrained(folder)
    else:
        tf.CLIPProcessor(joint_image_processor(), tokenizer()).save_pretrained(folder)
    return str(folder)
