"""The methods of Hugging Face's `Accelerator` take, where steps are measured, what they took before."""

import pytest
import torch

from accelerate_nb.runtime.observability.hf_accelerate import AccelerateSteps


class Theirs:
    __module__ = "accelerate.accelerator"
    device, process_index, num_processes = torch.device("cpu"), 0, 1
    _models, _optimizers = (), ()

    def prepare_model(self, model, evaluation_mode=False):
        return model.train(not evaluation_mode)

    def backward(self, loss, **kwargs):
        return loss, kwargs


@pytest.mark.usefixtures("listener")
def test_arguments_of_measured_methods_may_be_named():
    accelerator, number = Theirs(), torch.ones(())
    AccelerateSteps().measure(accelerator)
    assert accelerator.backward(loss=number, retain_graph=True) == (number, {"retain_graph": True})
    assert not accelerator.prepare_model(model=torch.nn.Linear(1, 1), evaluation_mode=True).training
