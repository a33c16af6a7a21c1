import subprocess
import sys

LIGHT = (
    "eagleray.serve.engine",
    "eagleray.serve.engine.detokenizer",
    "eagleray.serve.engine.limits",
    "eagleray.serve.engine.stream",
    "eagleray.serve.api.keys",
    "eagleray.serve.api.parsing",
    "eagleray.serve.address",
    "eagleray.serve.client",
    "eagleray.serve.spec",
    "eagleray.cli.serve",
)


def test_what_validates_requests_and_names_imports_neither_torch_nor_ray() -> None:
    code = f"import sys, {', '.join(LIGHT)}; print({{'torch', 'ray'}} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50)
    assert done.stdout.strip() == "set()", done.stderr
