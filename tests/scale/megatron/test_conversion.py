"""Models of transformers become models of Megatron and come back, on CPUs behind a shim."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from accelerate_nb import Accelerator
from accelerate_nb.utils import MegatronLMPlugin, megatron_from_transformers, megatron_to_transformers
from tests.scale.megatron.cuda_on_cpu import on_ranks
from tests.scale.megatron.gpt import LENGTH, VOCABULARY, assert_refused, batches, megatron_inputs

pytest.importorskip("transformers")

ROUNDING = 1e-5
# One word more than two ranks can share.
WORDS = VOCABULARY + 1
ON_CPU = {"use_cpu_initialization": True}
LLAMA: dict[str, Any] = {
    "vocab_size": WORDS,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 2 * LENGTH,
}
LLAMA_3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def gpt2(**settings: Any) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"vocab_size": WORDS, "n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 2 * LENGTH}
    return with_own_numbers(GPT2LMHeadModel(GPT2Config(**sizes, **settings)))


def llama(**settings: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    return with_own_numbers(LlamaForCausalLM(LlamaConfig(**{**LLAMA, **settings})))


def with_own_numbers(model: nn.Module) -> nn.Module:
    """The model in evaluation, no weight of which is zeros or ones, so that none can stand for another."""
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(torch.randn(weight.shape, generator=generator) * 0.2 + (0.0 if weight.dim() > 1 else 0.5))
    return model.eval()


MODELS = {
    "GPT-2": gpt2,
    "GPT-2 with a head of its own": lambda: gpt2(
        tie_word_embeddings=False, n_inner=40, activation_function="gelu", embd_pdrop=0.3
    ),
    "Llama with groups of heads": lambda: llama(num_key_value_heads=2),
    "Llama that shares its words": lambda: llama(
        num_key_value_heads=2, head_dim=12, tie_word_embeddings=True, attention_bias=True, mlp_bias=True
    ),
    "Llama 3": lambda: llama(rope_parameters={"rope_theta": 500000.0, **LLAMA_3}),
}


INTERLEAVED = {"virtual_pipeline_model_parallel_size": 2, "overlap_p2p_comm": True, "batch_p2p_comm": False}
# Degrees of the plugin, further settings of the models, and the models.
DEGREES: dict[str, tuple[dict[str, Any], dict[str, Any], list[str]]] = {
    "widths": ({"tp_degree": 2}, {}, list(MODELS)),
    "stages": ({"pp_degree": 2}, {}, list(MODELS)),
    "interleaved stages": ({"pp_degree": 2}, INTERLEAVED, ["GPT-2", "Llama with groups of heads"]),
}
CASES = [(degree, model) for degree, (_, _, models) in DEGREES.items() for model in models]


# The largest difference of logits, and whether this process has less than all; None for the weights but on the main process.
Outcome = tuple[float, bool, bool | None]


def converted() -> dict[str, dict[str, Outcome]]:
    """By degree and model what the way to Megatron and back came to, on this process."""
    found: dict[str, dict[str, Outcome]] = {}
    for degree, (settings, further, models) in DEGREES.items():
        accelerator = Accelerator(cpu=True, megatron_lm_plugin=MegatronLMPlugin(**settings))
        found[degree] = {name: there_and_back(accelerator, MODELS[name](), further) for name in models}
        accelerator.end_training()
    return found


def there_and_back(accelerator: Accelerator, source: Any, further: dict[str, Any]) -> Outcome:
    from transformers import AutoModelForCausalLM

    part = megatron_from_transformers(source, **ON_CPU, **further).eval()
    if getattr(part, "pre_process", False):
        assert part.embedding.embedding_dropout.p == getattr(source.config, "embd_pdrop", 0.0)
    model = accelerator.prepare_model(part, evaluation_mode=True)
    differences = []
    # an odd number of samples, too, which stages do not divide
    for batch in (batches()[0], batches()[1][:3]):
        inputs, _ = megatron_inputs(batch)
        with torch.no_grad():
            logits = model(*inputs, runtime_gather_output=True)
            # rows that were added for equal parts are the last word's
            words = torch.arange(logits.shape[-1]).clamp(max=WORDS - 1)
            differences.append((logits - source(inputs[0]).logits[..., words]).abs().max().item())
    state = megatron_to_transformers(model, source.config)
    is_part = sum(weight.numel() for weight in part.parameters()) < 0.8 * source.num_parameters()
    if not accelerator.is_main_process:
        assert state == {}
        return max(differences), is_part, None
    back = AutoModelForCausalLM.from_config(source.config)
    back.load_state_dict(state)
    memory, wanted = ({*map(Tensor.data_ptr, weights.values())} for weights in (state, source.state_dict()))
    assert len(memory) == len(wanted)
    is_same = all(torch.equal(value, back.state_dict()[name]) for name, value in source.state_dict().items())
    return max(differences), is_part, is_same


@pytest.fixture(scope="module")
def outcomes() -> list[dict[str, dict[str, Outcome]]]:
    return on_ranks(converted, 2)


@pytest.mark.timeout(180)
@pytest.mark.parametrize(("degree", "model"), CASES)
def test_a_model_computes_the_same_in_megatron_and_comes_back_bit_by_bit(
    degree: str, model: str, outcomes: list[dict[str, dict[str, Outcome]]]
) -> None:
    for rank, found in enumerate(outcomes):
        difference, is_part, is_same = found[degree][model]
        assert difference < ROUNDING
        assert is_part
        assert is_same is (True if rank == 0 else None)


def refused() -> None:
    """What can't be converted, on one process with groups of Megatron and before."""
    from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2Model, LlamaConfig

    source, tiny = gpt2(), {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
    assert_refused("Make the Accelerator with strategy='megatron'", lambda: megatron_from_transformers(source))
    accelerator = Accelerator(cpu=True, strategy="megatron")
    part = megatron_from_transformers(source, **ON_CPU)
    with_adapter = gpt2()
    with_adapter.adapter = nn.Linear(1, 1)
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}
    for text, model, settings in (
        ("'gpt2' (GPT2LMHeadModel) and 'llama' (LlamaForCausalLM) can be", BertForMaskedLM(BertConfig(**tiny)), {}),
        ("a model that predicts words is converted: GPT2LMHeadModel", GPT2Model(source.config), {}),
        ("it has beyond them 2, such as adapter.bias, adapter.weight", with_adapter, {}),
        ("scale_attn_by_inverse_layer_idx=True", gpt2(scale_attn_by_inverse_layer_idx=True), {}),
        ("'yarn'", llama(rope_parameters=yarn), {}),
        ("attention_bias=True", llama(attention_bias=True), {}),
        ("the activation 'tanh'", gpt2(activation_function="tanh"), {}),
        (
            "sequence_parallel was requested with megatron-core's own layers",
            source,
            {"sequence_parallel": True, "tensor_model_parallel_size": 2},
        ),
    ):
        assert_refused(text, partial(megatron_from_transformers, model, **settings))
    known = source.config.to_dict()
    words = "embedding.word_embeddings.weight of the model of Megatron has 65"
    heads = "decoder.layers.0.self_attention.linear_qkv.weight of the model of Megatron has 96"
    for text, config in (
        ("the type 'bert'", BertConfig()),
        ("it lacks 1, such as output_layer.weight", LlamaConfig(**LLAMA)),
        (f"vocab_size=1000 was passed, which are 1000 rows, but {words}", GPT2Config(**{**known, "vocab_size": 1000})),
        (f"which are 192 rows, but {heads}", GPT2Config(**{**known, "n_embd": 64})),
        (f"which are 48 rows, but {heads}", GPT2Config(**{**known, "n_embd": 16})),
    ):
        assert_refused(text, partial(megatron_to_transformers, part, config))
    accelerator.end_training()


def test_what_is_not_converted_is_refused_by_name() -> None:
    on_ranks(refused, 1)
