"""The arguments of a training by the engine under Megatron-LM's names, the model that they describe, and the step on its batches."""

from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Module

from accelerate_nb.errors import ConfigurationError, StateError
from accelerate_nb.runtime.operations.nested import send_to_device, tensors_of, with_leaves
from accelerate_nb.runtime.world.registry import at_world_exit

# What steps, models and schedules read where neither the plugin nor the model says it.
_DEFAULTS: dict[str, Any] = {
    **dict.fromkeys(("iteration", "consumed_train_samples", "consumed_valid_samples", "consumed_test_samples"), 0),
    "seed": 1234,
    # of a model
    "architecture": None,
    "model_return_dict": False,
    "make_vocab_size_divisible_by": 1,
    "padded_vocab_size": None,
    "transformer_impl": "local",
    # of a batch
    "eos_token_id": None,
    "reset_position_ids": False,
    "reset_attention_mask": False,
    "data_path": None,
    "split": "969, 30, 1",
    "data_cache_path": None,
    "check_for_nan_in_loss_and_grad": False,
    # of an optimizer and a schedule
    "optimizer": None,
    **dict.fromkeys(("lr_warmup_init", "weight_decay"), 0.0),
    **dict.fromkeys(("lr_wsd_decay_iters", "lr_wsd_decay_samples")),
    "lr_wsd_decay_style": "exponential",
}
# Arguments that have the name of a field of a `TransformerConfig`, and do not mean it, or are the strategy's.
_NOT_FIELDS = frozenset(
    {
        *("attention_backend", "calculate_per_token_loss", "recompute_granularity", "recompute_method"),
        *("recompute_num_layers", "params_dtype", "fp16", "bf16"),
    }
)


class _Current:
    """The arguments of this process's training, as functions of Megatron-LM's scripts ask for them."""

    arguments: Namespace | None = None


def get_args() -> Namespace:
    """The arguments of the training; `StateError` before a model was prepared."""
    if _Current.arguments is None:
        raise StateError(
            "The arguments of Megatron-LM were asked for before there are any. Give accelerator.prepare(...) a model of transformers "
            "with a MegatronLMPlugin first."
        )
    return _Current.arguments


def initialize(
    accelerator: Any,
    extra_args_provider: Callable[[ArgumentParser], ArgumentParser] | None = None,
    args_defaults: Mapping[str, Any] | None = None,
) -> None:
    """
    Begin a training with the plugin's settings and these arguments, which `get_args()` returns from now on.

    `extra_args_provider` adds arguments of its own, with their defaults, to a parser. The groups of processes are the `Accelerator`'s.
    """
    extra = {}
    if extra_args_provider is not None:
        extra = vars(extra_args_provider(ArgumentParser(allow_abbrev=False)).parse_known_args([])[0])
    plugin = accelerator.strategy.megatron_lm_plugin
    settings = {field.name: getattr(plugin, field.name) for field in fields(plugin)}
    arguments = Namespace(**{**_DEFAULTS, **settings, **extra, **(args_defaults or {})})
    mesh = accelerator.world.mesh
    arguments.tensor_model_parallel_size = mesh.tp
    arguments.pipeline_model_parallel_size = mesh.pp
    arguments.context_parallel_size = mesh.cp
    arguments.rank, arguments.world_size = accelerator.process_index, accelerator.num_processes
    arguments.params_dtype = accelerator.strategy.precision.dtype
    if arguments.padded_vocab_size is None:
        # with the rows that make parts of it equal
        multiple = arguments.make_vocab_size_divisible_by * mesh.tp
        arguments.padded_vocab_size = -(-arguments.orig_vocab_size // multiple) * multiple
    elif arguments.padded_vocab_size < getattr(arguments, "orig_vocab_size", 0):
        raise ConfigurationError(
            f"padded_vocab_size={arguments.padded_vocab_size} was requested for a vocabulary of {arguments.orig_vocab_size} words. Pass as "
            "many or more, or leave it out."
        )
    arguments.virtual_pipeline_model_parallel_size = None
    if (layers := arguments.num_layers_per_virtual_pipeline_stage) is not None:
        if mesh.pp == 1 or arguments.num_layers % (mesh.pp * layers):
            raise ConfigurationError(
                f"num_layers_per_virtual_pipeline_stage={layers} was requested for {arguments.num_layers} layers in {mesh.pp} stages, which "
                "it does not divide. Pass pp_degree=2 or more, and a number of layers that divides those of a stage."
            )
        parts = arguments.num_layers // (mesh.pp * layers)
        arguments.virtual_pipeline_model_parallel_size = parts if parts > 1 else None
    _Current.arguments = arguments
    # the training is over
    at_world_exit(lambda: setattr(_Current, "arguments", None))


def finish_mpu_init() -> None:
    """Nothing is left to do: the groups of processes were made with the `Accelerator`."""
    get_args()


# The model


def stages(provider: Callable[..., Module], count: int | None) -> list[Module]:
    """The parts of a model on this process, `count` where stages are interleaved: `provider(is_first, is_last)`, with `vp_stage=` then."""
    from megatron.core import parallel_state

    is_first, is_last = parallel_state.is_pipeline_first_stage(), parallel_state.is_pipeline_last_stage()
    if count is None:
        return [provider(is_first, is_last)]
    return [provider(is_first and stage == 0, is_last and stage == count - 1, vp_stage=stage) for stage in range(count)]


def build_part(
    arguments: Mapping[str, Any],
    words: int,
    config: Any,
    layer_spec: Any,
    is_first: bool,
    is_last: bool,
    vp_stage: int | None = None,
) -> Module:
    """A part of a `GPTModel`, of megatron-core's own layers without a `layer_spec`."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel

    if layer_spec is None:
        cut = {"sequence_parallel": config.sequence_parallel, "context_parallel_size": config.context_parallel_size > 1}
        if names := [name for name, is_cut in cut.items() if is_cut]:
            raise ConfigurationError(
                f"{' and '.join(names)} was requested with megatron-core's own layers, which compute whole sequences. Pass layer_spec with "
                "those of Transformer Engine, get_gpt_layer_with_transformer_engine_spec(...), to Accelerate's engine "
                "other_megatron_args={'transformer_impl': 'transformer_engine'}, or leave it out."
            )
        layer_spec = get_gpt_layer_local_spec(config.num_moe_experts, normalization=config.normalization)
    return GPTModel(  # type: ignore[no-any-return]  # a module of a package without types
        config=config,
        transformer_layer_spec=layer_spec,
        vocab_size=words,
        pre_process=is_first,
        post_process=is_last,
        vp_stage=vp_stage,
        **arguments,
    )


def model_provider_func(
    pre_process: bool = True,
    post_process: bool = True,
    add_encoder: bool = True,  # noqa: ARG001  # Accelerate's
    add_decoder: bool = True,  # noqa: ARG001  # as above
    *,
    vp_stage: int | None = None,
) -> Module:
    """
    This process's part of the model that the arguments describe; `pre_process` is of the first stage, `post_process` of the last.

    `vp_stage` is the number of the part on this process, where stages are interleaved.
    """
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec

    args = get_args()
    if args.architecture is None:
        raise StateError(
            "A model of Megatron was to be built before prepare has one of transformers. Call prepare first."
        )
    config = _transformer_config(args)
    layers = None
    if args.transformer_impl == "transformer_engine":
        layers = get_gpt_layer_with_transformer_engine_spec(config.num_moe_experts)
    arguments = {name: getattr(args, name, value) for name, value in args.architecture.arguments.items()}
    return build_part(arguments, args.padded_vocab_size, config, layers, pre_process, post_process, vp_stage)


def _transformer_config(args: Namespace) -> Any:
    """The `TransformerConfig` of the arguments: whichever have the name of one of its fields, and what Megatron-LM makes of others."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    names = {field.name for field in fields(TransformerConfig)} - _NOT_FIELDS
    has_gpu = torch.cuda.is_available()
    settings: dict[str, Any] = {
        # they need a compiler, or kernels of other packages
        "masked_softmax_fusion": False,
        "gradient_accumulation_fusion": False,
        "apply_rope_fusion": False,
        "bias_activation_fusion": False,
        "bias_dropout_fusion": has_gpu,
        "use_cpu_initialization": not has_gpu,
        "pipeline_dtype": args.params_dtype,
        **{name: value for name, value in vars(args).items() if name in names},
        "num_layers_in_last_pipeline_stage": args.decoder_last_pipeline_num_layers,
    }
    if args.recompute_activations:
        settings["recompute_granularity"] = args.recompute_granularity
        if args.recompute_granularity == "full":
            settings.update(recompute_method=args.recompute_method, recompute_num_layers=args.recompute_num_layers)
    if args.virtual_pipeline_model_parallel_size is not None and args.pipeline_model_parallel_size == 2:
        # messages of a stage to the next and to the former one go to the same process, and would be mixed up
        settings.update(overlap_p2p_comm=True, batch_p2p_comm=False)
    return TransformerConfig(**settings)


def avg_losses_across_data_parallel_group(losses: list[Tensor]) -> Tensor:
    """The means of losses (each a number) over the copies of a model, one tensor of the shape `(len(losses),)`, without a graph."""
    from megatron.core import parallel_state

    group = parallel_state.get_data_parallel_group()
    summed = torch.stack([loss.detach().reshape(()).clone() for loss in losses])
    dist.all_reduce(summed, group=group)
    return summed.div_(float(group.size()))


def gather_across_data_parallel_groups(tensor: Any) -> Any:
    """The tensors of all copies of a model, joined along dimension 0; nested in lists, tuples or mappings."""
    from megatron.core import parallel_state

    group = parallel_state.get_data_parallel_group()

    def gathered(item: Tensor) -> Tensor:
        own = (item[None] if item.ndim == 0 else item).contiguous()
        found = [torch.empty_like(own) for _ in range(group.size())]
        dist.all_gather(found, own, group=group)
        return torch.cat(found)

    return with_leaves(tensor, map(gathered, tensors_of("gather", tensor)))


def left_to_right(
    tokens: Tensor,
    *,
    end_of_document: int | None,
    pad: int | None,
    reset_position_ids: bool = False,
    reset_attention_mask: bool = False,
    masks_ends: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Attention mask (true hides), loss mask in float32 and positions of `tokens` (samples, length)."""
    # as Megatron-LM's get_ltor_masks_and_position_ids
    samples, length = tokens.shape
    sees = torch.ones(length, length, dtype=torch.bool, device=tokens.device).tril()[None]
    positions = torch.arange(length, device=tokens.device).expand(samples, length).clone()
    loss_mask = torch.ones(samples, length, dtype=torch.float32, device=tokens.device)
    if pad is not None:
        loss_mask[tokens == pad] = 0.0
    if masks_ends and end_of_document is not None:
        loss_mask[tokens == end_of_document] = 0.0
    if end_of_document is not None and (reset_position_ids or reset_attention_mask):
        # an end belongs to the document that it ends
        ends = (tokens == end_of_document).long()
        documents = ends.cumsum(1) - ends
        if reset_attention_mask:
            sees = sees & (documents[:, :, None] == documents[:, None, :])
        if reset_position_ids:
            is_first = torch.ones_like(ends, dtype=torch.bool)
            is_first[:, 1:] = ends[:, :-1].bool()
            starts = torch.where(is_first, positions, 0).cummax(1).values
            positions = positions - starts
    return ~sees[:, None], loss_mask, positions


class AbstractTrainStep:
    """
    The step of an engine on one part of a batch: how it is read, brought through the model, and what its loss is.

    A class of yours sets `get_batch`, `loss_func`, `forward_step(data_iterator, model)` and `model_output_class` (or `None`).
    """

    model_output_class: Any = None
    forward_step: Callable[..., Any]

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def get_batch_func(self, accelerator: Any, megatron_dataset_flag: bool) -> Any:
        """The function that reads a part of a batch from an iterator."""

    def get_forward_step_func(self) -> Any:
        """The function of an iterator and a model that returns the output, and the function of the output that is the loss."""

    def get_loss_func(self, accelerator: Any) -> Any:
        """The function that returns a loss, and the numbers to report, by name."""


class GPTTrainStep(AbstractTrainStep):
    """A step that predicts each next token; the loss is the mean over the tokens that are no padding."""

    def __init__(self, accelerator: Any, args: Namespace) -> None:
        super().__init__("GPTTrainStep")
        self.eod_token = self.pad_token = args.eos_token_id
        self.reset_position_ids = args.reset_position_ids
        self.reset_attention_mask = args.reset_attention_mask
        self.eod_mask_loss = args.eod_mask_loss
        self.return_logits = args.return_logits
        self.get_batch = self.get_batch_func(accelerator, args.megatron_dataset_flag)
        self.loss_func = self.get_loss_func(accelerator)
        self.forward_step = self.get_forward_step_func()
        if args.model_return_dict:
            from transformers.modeling_outputs import CausalLMOutputWithCrossAttentions

            self.model_output_class = CausalLMOutputWithCrossAttentions

    def get_batch_func(self, accelerator: Any, megatron_dataset_flag: bool) -> Any:
        """The plugin's function, or one that returns tokens, labels, loss mask, attention mask and positions."""
        own = self._batch_of_megatron if megatron_dataset_flag else self._batch_of_transformers
        return accelerator.state.megatron_lm_plugin.custom_get_batch_function or own

    def _batch_of_megatron(self, data_iterator: Iterator[Any] | None) -> tuple[Tensor, ...]:
        """A part of a batch of a data set of Megatron's: sequences that are one token longer, or tokens and labels."""
        data = None if data_iterator is None else next(data_iterator)
        if data is not None and "text" not in data:
            batch = send_to_device(data, torch.cuda.current_device())
            tokens, labels = batch["tokens"].long(), batch["labels"].long()
            mask, _, _ = left_to_right(tokens, end_of_document=None, pad=None)
            return tokens, labels, batch["loss_mask"].float(), batch.get("attention_mask", mask), batch["position_ids"]
        from megatron.core import tensor_parallel

        found = tensor_parallel.broadcast_data(["text"], data, torch.int64)["text"].long()
        return self._with_masks(found)

    def _batch_of_transformers(self, data_iterator: Iterator[Any]) -> tuple[Tensor, ...]:
        """A part of a batch of `input_ids`, with labels that are the next token each, the end of a text after the last."""
        tokens = send_to_device(next(data_iterator)["input_ids"], torch.cuda.current_device()).long()
        if self.eod_token is None:
            batch = self._with_masks(torch.cat([tokens, tokens[:, -1:]], dim=1))
            # nothing follows the last token
            batch[2][:, -1] = 0.0
            return batch
        return self._with_masks(torch.nn.functional.pad(tokens, (0, 1), value=self.eod_token))

    def _with_masks(self, sequences: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        tokens, labels = sequences[:, :-1].contiguous(), sequences[:, 1:].contiguous()
        attention_mask, loss_mask, position_ids = left_to_right(
            tokens,
            end_of_document=self.eod_token,
            pad=self.pad_token,
            reset_position_ids=self.reset_position_ids,
            reset_attention_mask=self.reset_attention_mask,
            masks_ends=self.eod_mask_loss,
        )
        return tokens, labels, loss_mask, attention_mask, position_ids

    def get_loss_func(self, accelerator: Any) -> Any:
        """The plugin's function, or one of the loss mask and the output: losses of tokens, with logits where they are requested."""
        return accelerator.state.megatron_lm_plugin.custom_loss_function or self._loss

    def _loss(self, loss_mask: Tensor, output_tensor: Any) -> tuple[Tensor, dict[str, Tensor]]:
        losses, logits = output_tensor if self.return_logits else (output_tensor, None)
        mask = loss_mask.reshape(-1).float()
        loss = (losses.float().reshape(-1) * mask).sum() / mask.sum().clamp(min=1.0)
        if get_args().check_for_nan_in_loss_and_grad and loss.isnan():
            raise StateError(
                "The loss of a step is NaN. Lower the learning rate, or leave check_for_nan_in_loss_and_grad out to go on."
            )
        reported = {"lm loss": avg_losses_across_data_parallel_group([loss])[0]}
        return loss, reported if logits is None else {**reported, "logits": logits.detach()}

    def get_forward_step_func(self) -> Any:
        """The function of an iterator and a model."""
        return self._forward

    def _forward(self, data_iterator: Any, model: Module) -> tuple[Any, Callable[..., Any]]:
        tokens, labels, loss_mask, attention_mask, position_ids = self.get_batch(data_iterator)
        if not self.return_logits:
            return model(tokens, position_ids, attention_mask, labels=labels), partial(self.loss_func, loss_mask)
        from megatron.core import tensor_parallel
        from megatron.core.utils import unwrap_model

        output = model(tokens, position_ids, attention_mask)
        inner: Any = unwrap_model(model)
        if inner.post_process:
            losses = inner.compute_language_model_loss(labels, output.transpose(0, 1).contiguous())
            output = losses, tensor_parallel.gather_from_tensor_model_parallel_region(output.detach())
        return output, partial(self.loss_func, loss_mask)
