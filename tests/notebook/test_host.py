"""Where we are is found out without guessing."""

import json
import os
import pty
import subprocess
import sys

import nbformat
import pytest
from nbclient import NotebookClient

from accelerate_nb.notebook import host as hosting
from accelerate_nb.notebook.host import host, reader_of

REPORT = """
import json, os
from accelerate_nb.notebook.host import host
here = host(os.environ)
print(json.dumps([here.kind, here.service, type(here.screen()).__name__]))
"""


def test_a_kernel_is_a_kernel():
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(REPORT)])
    NotebookClient(notebook, timeout=60, kernel_name="python3").execute()
    assert json.loads(notebook.cells[0].outputs[0].text) == ["jupyter", None, "CellSink"]


def test_a_script_in_a_pipe_is_a_script():
    done = subprocess.run([sys.executable, "-c", REPORT], capture_output=True, text=True, check=True, timeout=60)
    assert json.loads(done.stdout) == ["script", None, "TextSink"]


def test_a_script_that_imported_ipython_is_still_a_script():
    code = "import IPython\n" + REPORT
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert json.loads(done.stdout)[0] == "script"


def test_ipython_in_a_terminal_is_ipython(tmp_path):
    script = tmp_path / "script.ipy"
    script.write_text(REPORT)
    ours, theirs = pty.openpty()
    environment = {**os.environ, "IPYTHONDIR": str(tmp_path), "TERM": "xterm"}
    process = subprocess.Popen(
        [sys.executable, "-m", "IPython", "--quick", str(script)],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=environment,
    )
    os.close(theirs)
    received = b""
    try:
        while part := os.read(ours, 65536):
            received += part
    except OSError:  # Linux says so when the other side has closed
        pass
    os.close(ours)
    assert process.wait(30) == 0
    assert '["ipython", null, "TerminalSink"]' in received.decode()


class Shell:
    """The part of a notebook's shell that is looked at."""

    kernel = object()


def test_colab_is_known_by_its_shell(monkeypatch):
    colab = type("Shell", (Shell,), {"__module__": "google.colab._shell"})
    monkeypatch.setattr(hosting, "_shell", colab)
    # credentials of Kaggle in the environment do not make a Kaggle of it
    assert host({"KAGGLE_USERNAME": "me", "KAGGLE_KEY": "secret"}).service == "colab"


@pytest.mark.parametrize(
    ("environment", "service"),
    [({"KAGGLE_KERNEL_RUN_TYPE": "Interactive"}, "kaggle"), ({"KAGGLE_USERNAME": "me"}, None), ({}, None)],
)
def test_kaggle_is_known_by_its_run_type(monkeypatch, environment, service):
    monkeypatch.setattr(hosting, "_shell", Shell)
    assert host(environment).service == service


@pytest.mark.parametrize(
    ("command", "reader"),
    [
        ("python -m nbconvert --to notebook --execute a.ipynb", "file"),
        ("/venv/bin/python /venv/bin/jupyter-nbconvert --execute a.ipynb", "file"),
        ("/venv/bin/python /venv/bin/jupyter execute a.ipynb", "file"),
        ("python -m papermill a.ipynb b.ipynb", "file"),
        ("/venv/bin/python /venv/bin/accelerate-nb launch a.ipynb --execute", "file"),
        ("python -m accelerate_nb launch a.ipynb --execute", "file"),
        ("/venv/bin/python /venv/bin/jupyter-lab /home/me/accelerate-nb", "page"),
        ("python -m jupyter_console --existing", "console"),
        ("/venv/bin/python /venv/bin/jupyter-lab --no-browser nbconvert.ipynb", "page"),
        ("/venv/bin/python -m jupyterhub.singleuser", "page"),
        ("python /home/me/papermill/serve.py", "page"),
        ("", "page"),
    ],
)
def test_what_reads_a_kernel_is_known_by_its_command(command, reader):
    assert reader_of(command.split()) == reader


@pytest.mark.parametrize("parent", ["", "nonsense", "999999999", "-1", str(2**80)])
def test_a_kernel_whose_parent_can_not_be_seen_may_well_have_a_page(monkeypatch, parent):
    monkeypatch.setattr(hosting, "_shell", Shell)
    assert host({"JPY_PARENT_PID": parent}).reader == "page"


@pytest.mark.slow
def test_a_notebook_that_is_executed_into_a_file_is_known(tmp_path):
    notebook = tmp_path / "a.ipynb"
    code = "import os\nfrom accelerate_nb.notebook.host import host\nprint(host(os.environ).reader)"
    nbformat.write(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code)]), notebook)
    command = [sys.executable, "-m", "nbconvert", "--to", "notebook", "--execute", "--inplace", str(notebook)]
    subprocess.run(command, capture_output=True, check=True, timeout=60)
    assert nbformat.read(notebook, 4).cells[0].outputs[0].text == "file\n"


@pytest.mark.parametrize(
    ("environment", "names", "service"),
    [
        ({"VSCODE_PID": "1"}, {}, "vscode"),
        ({}, {"__vsc_ipynb_file__": "a.ipynb"}, "vscode"),
        ({"TERM_PROGRAM": "vscode"}, {}, None),
    ],
)
def test_vs_code_is_known_by_its_kernels(monkeypatch, environment, names, service):
    monkeypatch.setattr(hosting, "_shell", type("Shell", (Shell,), {"user_ns": names}))
    assert host(environment).service == service
