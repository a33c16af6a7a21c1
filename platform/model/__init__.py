"""The decoder that trainer and server share: architecture, weights on disk, text.

Modules, each imported by its own name so that `config` stays free of torch:
    config       what a decoder is made of; parameters and FLOPs counted
    decoder      the torch module and its attention seam
    hf_config    config.json and tokenizer files in the Hugging Face layout
    hf_layout    the whole folder in that layout: save and load
    gguf_import  llama.cpp files into that layout (needs the `gguf` extra)
    text         text and chat messages to token ids and back
"""

from eagleray.platform.model.config import DecoderConfig

__all__ = ["DecoderConfig"]
