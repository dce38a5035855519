"""The settings of Megatron-LM mean what Accelerate's do; masks of its engine, and the choice of its next token."""

from argparse import ArgumentParser
from types import SimpleNamespace
from typing import Any

import accelerate.utils as theirs
import pytest
import torch

import accelerate_nb.utils as ours
from accelerate_nb import Accelerator, ConfigurationError
from accelerate_nb.config.options.megatron import refuse_unused
from accelerate_nb.errors import MissingExtraError, NotYetError
from accelerate_nb.runtime.compat.packages import is_installed
from accelerate_nb.runtime.strategies.megatron.conversion import architecture_of
from accelerate_nb.runtime.strategies.megatron.engine import choose, left_to_right
from accelerate_nb.runtime.strategies.megatron.training import get_args, initialize

END = 9
GIVEN: list[tuple[dict[str, Any], dict[str, str]]] = [
    ({}, {}),
    ({"tp_degree": 2, "pp_degree": 2, "num_micro_batches": 4, "sequence_parallelism": True}, {}),
    ({"use_distributed_optimizer": True, "consumed_samples": [8]}, {"GRADIENT_CLIPPING": "0.5"}),
    ({"other_megatron_args": {"seed": 3}}, {"TP_DEGREE": "4", "RECOMPUTE_ACTIVATIONS": "true"}),
]


@pytest.mark.parametrize(("settings", "variables"), GIVEN)
def test_arguments_of_megatron_are_those_of_accelerate(
    settings: dict[str, Any], variables: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Accelerate's default splits sequences in 2
    for name, value in {"CONTEXT_PARALLEL_SIZE": "1", **variables}.items():
        monkeypatch.setenv(f"MEGATRON_LM_{name}", value)
    assert arguments(ours, settings) == arguments(theirs, settings)


def arguments(package: Any, settings: dict[str, Any]) -> dict[str, Any]:
    plugin = package.MegatronLMPlugin(**{name: list(v) if isinstance(v, list) else v for name, v in settings.items()})
    model = torch.nn.Linear(2, 2)
    plugin.set_mixed_precision("bf16")
    plugin.set_training_args(4, 2)
    plugin.set_optimizer_type(torch.optim.AdamW(model.parameters(), 0.1))
    plugin.set_scheduler_args(SimpleNamespace(total_num_steps=100, warmup_num_steps=10))
    sizes = {"n_layer": 2, "n_embd": 8, "n_head": 2, "n_positions": 16, "vocab_size": 32, "return_dict": True}
    plugin.set_network_size_args(SimpleNamespace(config=SimpleNamespace(model_type="gpt2", **sizes)))
    return dict(plugin.megatron_lm_default_args)


LLAMA = {"num_hidden_layers": 2, "hidden_size": 8, "num_attention_heads": 2, "max_position_embeddings": 16}


@pytest.mark.parametrize(
    ("settings", "config"),
    [
        ({"seq_length": 4, "decoder_seq_length": 6}, {"max_sequence_length": 12}),
        ({"decoder_seq_length": 6}, {"max_sequence_length": 12}),
        ({"decoder_seq_length": 6}, {}),
        ({}, {}),
    ],
)
def test_a_llama_has_the_length_of_sequences_of_accelerate(settings: dict[str, Any], config: dict[str, Any]) -> None:
    lengths = []
    for package in (ours, theirs):
        plugin = package.MegatronLMPlugin(**settings)
        described = SimpleNamespace(model_type="llama", vocab_size=32, return_dict=True, **LLAMA, **config)
        plugin.set_network_size_args(SimpleNamespace(config=described))
        lengths.append(plugin.megatron_lm_default_args["seq_length"])
    assert lengths[0] == lengths[1]


def with_other_defaults(parser: ArgumentParser) -> ArgumentParser:
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--split", default="1,1,1")
    return parser


def test_arguments_of_a_person_go_before_the_defaults() -> None:
    precision, mesh = SimpleNamespace(dtype=torch.float32), SimpleNamespace(tp=1, pp=1, cp=1)
    accelerator = SimpleNamespace(
        process_index=0,
        num_processes=1,
        world=SimpleNamespace(mesh=mesh),
        strategy=SimpleNamespace(precision=precision, megatron_lm_plugin=ours.MegatronLMPlugin()),
    )
    initialize(accelerator, with_other_defaults, {"orig_vocab_size": 8, "split": "2,1,1"})
    assert (get_args().seed, get_args().split) == (7, "2,1,1")
    Accelerator(cpu=True).end_training()


def small_gpt2() -> Any:
    transformers = pytest.importorskip("transformers")
    sizes = {"n_layer": 1, "n_embd": 8, "n_head": 2, "n_positions": 4, "vocab_size": 5}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes))


def test_weights_are_converted_and_come_back_whatever_torch_s_default_device() -> None:
    source = small_gpt2()
    wanted = source.state_dict()
    with torch.device("meta"):
        weights = architecture_of(source.config).weights(8)
        converted = {weight.name: weight.join(wanted) for weight in weights}
        back = {name: part for weight in weights for name, part in weight.split(converted[weight.name]).items()}
    torch.testing.assert_close(back, dict(wanted), rtol=0, atol=0)
    words = converted["embedding.word_embeddings.weight"]
    assert torch.equal(words, wanted["lm_head.weight"][[0, 1, 2, 3, 4, 4, 4, 4]])


@pytest.mark.parametrize(("name", "value"), [("vocab_size", 4), ("vocab_size", 7), ("n_embd", 4), ("n_embd", 16)])
def test_weights_that_have_other_rows_than_their_configuration_are_not_converted(name: str, value: int) -> None:
    source = small_gpt2()
    setattr(source.config, name, value)
    weights = architecture_of(source.config).weights(8)
    with pytest.raises(
        ConfigurationError, match=r"which are \d+ rows, but transformer\.\S+ of the model of transformers has"
    ):
        for weight in weights:
            weight.join(source.state_dict())


def test_sequences_are_whole_by_default_and_settings_that_can_not_be_are_refused() -> None:
    plugin = ours.MegatronLMPlugin()
    assert plugin.context_parallel_size == 1
    for name, value in (("tp_degree", 0), ("num_micro_batches", -1)):
        with pytest.raises(ConfigurationError, match=name):
            ours.MegatronLMPlugin(**{name: value})
    with pytest.raises(ConfigurationError, match="Megatron was requested with strategy='fsdp'"):
        Accelerator(cpu=True, megatron_lm_plugin=plugin, strategy="fsdp")
    fsdp = ours.FullyShardedDataParallelPlugin(fsdp_version=2)
    with pytest.raises(ConfigurationError, match="Megatron was requested with an fsdp_plugin"):
        Accelerator(cpu=True, megatron_lm_plugin=plugin, fsdp_plugin=fsdp)
    for kind in ("megatron-bert", "t5", "code_llama"):
        with pytest.raises(ConfigurationError, match=kind):
            plugin.set_network_size_args(SimpleNamespace(config=SimpleNamespace(model_type=kind)))


@pytest.mark.skipif(is_installed("megatron", "megatron-core"), reason="megatron-core is installed")
@pytest.mark.parametrize("requested", [{"strategy": "megatron"}, {"megatron_lm_plugin": ours.MegatronLMPlugin()}])
def test_a_missing_package_names_its_extra(requested: dict[str, Any]) -> None:
    with pytest.raises(MissingExtraError, match=r"accelerate-nb\[megatron\]"):
        Accelerator(cpu=True, **requested)


UNREAD = {"hidden_dropout": 0.1, "train_iters": 100, "custom_loss_function": print, "optimizer_cpu_offload": True}


def test_a_setting_that_nothing_reads_is_named_and_those_that_a_step_reads_are_let_through() -> None:
    for name, value in UNREAD.items():
        with pytest.raises(NotYetError, match=rf"MegatronLMPlugin\({name}=\.\.\.\) was requested"):
            refuse_unused(ours.MegatronLMPlugin(**{name: value}))
    steps = {"num_micro_batches": 4, "gradient_clipping": 0.5, "sequence_parallelism": True}
    read = {"use_distributed_optimizer": True, "hidden_dropout": 0.0, "recompute_granularity": "full"}
    for settings in ({}, {"tp_degree": 2, "pp_degree": 2, **steps}, read):
        refuse_unused(ours.MegatronLMPlugin(**settings))
    refuse_unused(ours.MegatronLMPlugin(hidden_dropout=0.1, train_iters=10), by_engine=True)


def test_a_token_sees_itself_and_what_stands_before_it() -> None:
    mask, loss_mask, positions = left_to_right(torch.tensor([[1, END, 2, 3]]), end_of_document=None, pad=None)
    assert torch.equal(mask, torch.ones(4, 4, dtype=torch.bool).triu(1)[None, None])
    assert loss_mask.tolist() == [[1.0] * 4]
    assert positions.tolist() == [[0, 1, 2, 3]]


def test_documents_see_nothing_of_each_other_and_begin_at_zero() -> None:
    tokens = torch.tensor([[1, END, 2, 3], [1, 2, END, 3]])
    mask, loss_mask, positions = left_to_right(
        tokens, end_of_document=END, pad=None, reset_position_ids=True, reset_attention_mask=True, masks_ends=True
    )
    # an end belongs to the document that it ends
    seen = [
        [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 1, 1]],
        [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [0, 0, 0, 1]],
    ]
    assert torch.equal(~mask[:, 0], torch.tensor(seen).bool())
    assert positions.tolist() == [[0, 1, 0, 1], [0, 1, 2, 0]]
    assert loss_mask.tolist() == [[1, 0, 1, 1], [1, 1, 0, 1]]


@pytest.mark.parametrize(
    ("settings", "possible"),
    [
        ({}, {3}),
        ({"temperature": 0.0}, {3}),
        ({"top_k": 1, "temperature": 5.0}, {3}),
        ({"top_k": 2, "temperature": 5.0}, {3, 1}),
        ({"top_p": 0.5}, {3}),
        ({"top_p": 0.85}, {3, 1}),
        ({"temperature": 50.0}, {0, 1, 2, 3}),
    ],
)
def test_a_token_is_drawn_among_the_likeliest(settings: dict[str, float], possible: set[int]) -> None:
    torch.manual_seed(0)
    logits = torch.tensor([0.05, 0.3, 0.05, 0.6]).log().repeat(500, 1)
    known = {"temperature": None, "top_k": None, "top_p": None}
    assert set(choose(logits, **{**known, **settings}).tolist()) == possible
