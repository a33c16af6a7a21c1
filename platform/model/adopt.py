"""Take in a model folder that somebody else made, after checking that it is one we can serve."""

import shutil
from pathlib import Path

from eagleray.platform.model import hf_layout
from eagleray.platform.model.text import ModelText

# Nothing else is copied: a model folder from outside may hold code, pickles or anything.
_PATTERNS = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json",
    "special_tokens_map.json", "chat_template.jinja", "*.safetensors", "*.safetensors.index.json",
)  # fmt: skip


def adopt(source: Path, folder: Path) -> None:
    """Copy a Hugging Face Llama folder's known files into `folder`.

    Raises:
        DataError: A file is missing or damaged, or it is not a Llama; nothing was copied.
    """
    hf_layout.load(source)
    ModelText(source)
    for pattern in _PATTERNS:
        for path in sorted(source.glob(pattern)):
            shutil.copyfile(path, folder / path.name)
