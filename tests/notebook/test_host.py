"""Where we are is found out without guessing."""

import json
import os
import sys

import nbformat
import pexpect
import pytest
from nbclient import NotebookClient

from accelerate_nb.notebook import host as hosting
from accelerate_nb.notebook.host import host, reader_of
from tests.processes import python

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


@pytest.mark.parametrize("before", ["", "import IPython\n"], ids=["alone", "with IPython imported"])
def test_a_script_in_a_pipe_is_a_script(before):
    assert json.loads(python("-c", before + REPORT, check=True).stdout) == ["script", None, "TextSink"]


def test_ipython_in_a_terminal_is_ipython(tmp_path):
    script = tmp_path / "script.ipy"
    script.write_text(REPORT)
    environment = {**os.environ, "IPYTHONDIR": str(tmp_path), "TERM": "xterm"}
    command = ["-m", "IPython", "--quick", str(script)]
    child = pexpect.spawn(sys.executable, command, env=environment, timeout=60, encoding="utf-8")
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 0
    assert '["ipython", null, "TerminalSink"]' in child.before


def shell(**members):
    """What gives a notebook's shell, as far as that is looked at."""
    return type("Shell", (), {"kernel": object(), **members})


@pytest.mark.parametrize(
    ("environment", "members", "service"),
    [
        # Colab by its shell: credentials of Kaggle in the environment do not make a Kaggle of it
        ({"KAGGLE_USERNAME": "me", "KAGGLE_KEY": "secret"}, {"__module__": "google.colab._shell"}, "colab"),
        ({"KAGGLE_KERNEL_RUN_TYPE": "Interactive"}, {}, "kaggle"),
        ({"KAGGLE_USERNAME": "me"}, {}, None),
        ({}, {}, None),
        ({"VSCODE_PID": "1"}, {"user_ns": {}}, "vscode"),
        ({}, {"user_ns": {"__vsc_ipynb_file__": "a.ipynb"}}, "vscode"),
        ({"TERM_PROGRAM": "vscode"}, {"user_ns": {}}, None),
    ],
)
def test_colab_is_known_by_shell_kaggle_by_run_type_and_vs_code_by_kernels(monkeypatch, environment, members, service):
    monkeypatch.setattr(hosting, "ipython_shell", shell(**members))
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
    monkeypatch.setattr(hosting, "ipython_shell", shell())
    assert host({"JPY_PARENT_PID": parent}).reader == "page"
