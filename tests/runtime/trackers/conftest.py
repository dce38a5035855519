"""Trackers under test keep everything on this machine."""

from pathlib import Path

import pytest

# Each package's own way to stay at home.
AT_HOME = {
    "WANDB_MODE": "offline",
    "WANDB_SILENT": "true",
    "WANDB_ERROR_REPORTING": "false",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_ALLOW_FILE_STORE": "true",  # a database takes seconds to be made
    "GIT_PYTHON_REFRESH": "quiet",
    "DVC_NO_ANALYTICS": "1",
    "COMET_LOGGING_CONSOLE": "ERROR",
    "CLEARML_OFFLINE_MODE": "1",
    "SWANLAB_MODE": "offline",
    "HF_HUB_OFFLINE": "1",
    "GRADIO_ANALYTICS_ENABLED": "False",
    "DO_NOT_TRACK": "1",
}
# Whoever tries all the same meets a proxy that isn't there.
NOWHERE = dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), "http://127.0.0.1:9")


@pytest.fixture(autouse=True)
def _at_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    for name, value in {**AT_HOME, **NOWHERE, "HOME": str(home), "no_proxy": "127.0.0.1,localhost"}.items():
        monkeypatch.setenv(name, value)
