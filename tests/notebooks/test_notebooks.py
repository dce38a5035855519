"""The notebooks keep what they promise: each runs from top to bottom in a kernel of its own."""

import math
import re
from pathlib import Path

import nbformat
import pytest

from tests.notebooks.executing import LIMIT, NOTEBOOKS, Executing, pictures, printed

# on a busy machine a notebook takes its time
pytestmark = pytest.mark.timeout(2 * LIMIT)


def test_the_first_run_recognises_97_percent_of_the_digits_on_two_processes(run_of: Executing) -> None:
    run = run_of("01_first_run.ipynb")
    result = run.answer[0]
    assert result["accuracies"][-1] >= 0.97
    assert (result["processes"], result["precision"]) == (2, "bf16")
    assert len(result["losses"]) == len(result["accuracies"]) == 20
    assert result["losses"][-1] < 0.1 * result["losses"][0]
    assert pictures(run.notebook) == 2


def test_the_first_run_tests_on_each_digit_exactly_once(run_of: Executing) -> None:
    run = run_of("01_first_run.ipynb")
    launched = printed(run.cells["launch"])
    assert f" of {run.answer[1]} test digits correct" in launched
    # what is normal, and handled, is not reported
    assert "repeated" not in launched


def test_one_two_and_four_processes_give_the_same_losses(run_of: Executing) -> None:
    run = run_of("02_same_numbers.ipynb")
    runs = run.answer
    alone = runs["1"]
    assert len(alone) == 3 * 28
    assert alone[-1] < 0.5 * alone[0]
    for count in ("2", "4"):
        assert runs[count] == pytest.approx(alone, rel=1e-4)
    assert runs["2"] != runs["4"]  # that many processes did run: their sums are rounded differently
    assert pictures(run.notebook) == 1


def test_a_language_model_learns_from_the_manual_on_two_processes(run_of: Executing) -> None:
    run = run_of("03_language_model.ipynb")
    result = run.answer
    assert result["processes"] == 2
    assert len(result["losses"]) == 3 * 142
    assert result["losses"][0] == pytest.approx(math.log(1024), abs=0.2)  # before it has learned anything
    assert result["tests"] == sorted(result["tests"], reverse=True)
    assert result["tests"][-1] < 4.2
    cells = run.cells
    # how many there are depends on the manual, and so on the version of Python
    assert len(set(re.findall(r"on (\d+) unseen pieces", printed(cells["launch"])))) == 1
    before, after = (printed(cells[name]).partition("The for statement")[2] for name in ("model", "after"))
    assert before
    assert after
    assert before != after
    assert pictures(run.notebook) == 1


def test_cells_on_two_ranks_train_step_by_step_and_an_error_costs_nothing(run_of: Executing) -> None:
    run = run_of("05_cells_on_every_rank.ipynb")
    accuracy, losses = run.answer
    assert accuracy > 0.97
    assert len(losses) == 8 * 29
    cells = run.cells
    assert "[0-1] hello from a session of 2" in printed(cells["start"])
    assert "[1]   I am rank 1" in printed(cells["start"])
    assert printed(cells["one"]).count("gradient") == 1
    assert printed(cells["one"]).count("loss") == 2
    (error,) = (output for output in cells["error"].outputs if output.output_type == "error")
    assert error.ename == "IndexError"
    assert "rank 1" in "\n".join(error.traceback)
    assert "2." in printed(cells["after"])
    assert pictures(run.notebook) == 1


def test_a_picked_configuration_is_launched_kept_and_tried(run_of: Executing) -> None:
    run = run_of("06_pick_a_configuration.ipynb")
    result, from_file, states = run.answer
    assert (result["processes"], result["precision"]) == (2, "bf16")
    assert result["loss"] < 0.02
    assert (from_file["processes"], from_file["precision"]) == (1, "no")
    assert states == ["passed"] * 7
    form = run.cells["form"].outputs[0].data["text/plain"]
    assert "notebook_launcher(" in form
    assert "num_processes=2" in form


def test_a_model_in_parts_has_the_losses_of_one_process_and_half_of_its_memory(run_of: Executing) -> None:
    run = run_of("08_larger_models.ipynb")
    losses = {name: found[0] for name, found in run.answer.items()}
    megabytes = {name: found[1] for name, found in run.answer.items()}
    assert losses["one process"][-1] < 0.8 * losses["one process"][0]
    assert len(losses) == 7
    for found in losses.values():
        assert found == pytest.approx(losses["one process"], rel=1e-3)
    assert megabytes["DDP"] == megabytes["CP"] == megabytes["one process"]
    assert megabytes["FSDP"] == megabytes["HSDP"] == pytest.approx(megabytes["DDP"] / 2, rel=1e-3)
    assert megabytes["FSDP x TP"] < 0.3 * megabytes["DDP"]
    assert megabytes["PP"] == pytest.approx(megabytes["DDP"] / 2, rel=0.1)
    assert pictures(run.notebook) == 1


def test_two_agents_that_pretend_to_be_machines_train_alike_and_one_is_lost_in_words(run_of: Executing) -> None:
    run = run_of("10_many_machines.ipynb")
    places, difference = run.answer
    assert places == [[0, 0, 0], [0, 1, 1], [1, 0, 2], [1, 1, 3]]
    assert difference < 1e-6
    assert "the agent of node 1 (rank 1) was lost" in printed(run.cells["lost"])
    assert "2 ranks are there again" in printed(run.cells["again"])


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_a_notebook_is_saved_clean(path: Path) -> None:
    notebook = nbformat.read(path, as_version=nbformat.NO_CONVERT)
    nbformat.validate(notebook)
    assert len({cell.id for cell in notebook.cells}) == len(notebook.cells)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(cell.outputs == [] and cell.execution_count is None for cell in code)
    assert notebook.cells[0].source.startswith("# ")


def test_the_panel_s_notebook_shows_both_runs_where_no_page_is(run_of: Executing) -> None:
    run = run_of("04_panel.ipynb")
    results = run.answer
    assert [result["processes"] for result in results] == [2, 2]
    assert [result["steps"] for result in results] == [6 * 125, 3 * 125]
    assert results[0]["loss"] < 0.2
    assert pictures(run.notebook) == 2
    assert "epoch 3: the last batch has a loss of" in printed(run.cells["later"])


def test_the_notebook_for_tpus_prints_what_it_found_and_learns_on_it(run_of: Executing) -> None:
    run = run_of("07_tpu.ipynb")
    expected = {1: "Found 1 x CPU device", 2: "Found no TPU and no GPU"}[run.answer["ranks"]]
    assert expected in printed(run.cells["found"])
    assert run.answer["total"] == 261
    assert run.answer["correct"] >= 0.88 * 261
    assert run.answer["losses"][-1] < 0.3 * run.answer["losses"][0]
    assert pictures(run.notebook) == 1


def test_a_notebook_without_its_package_names_the_extra(run_of: Executing) -> None:
    run = run_of("09_deepspeed_and_megatron.ipynb")
    needs_extra = "pip install 'accelerate-nb[deepspeed]'" in printed(run.cells["load"])
    assert needs_extra is ("ZeRO 1" not in run.answer)
    assert run.answer["DDP"]["losses"][-1] < run.answer["DDP"]["losses"][0]
