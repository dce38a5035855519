"""The import path `accelerate.utils`: what Hugging Face offers under this module name, as far as it is offered."""

from accelerate_nb.big_models.bnb import (
    BnbQuantizationConfig as BnbQuantizationConfig,
    has_4bit_bnb_layers as has_4bit_bnb_layers,
    load_and_quantize_model as load_and_quantize_model,
)
from accelerate_nb.runtime.checkpoints.file_names import (
    MODEL_NAME as MODEL_NAME,
    OPTIMIZER_NAME as OPTIMIZER_NAME,
    RNG_STATE_NAME as RNG_STATE_NAME,
    SAFE_MODEL_NAME as SAFE_MODEL_NAME,
    SAFE_WEIGHTS_INDEX_NAME as SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_NAME as SAFE_WEIGHTS_NAME,
    SAFE_WEIGHTS_PATTERN_NAME as SAFE_WEIGHTS_PATTERN_NAME,
    SAMPLER_NAME as SAMPLER_NAME,
    SCALER_NAME as SCALER_NAME,
    SCHEDULER_NAME as SCHEDULER_NAME,
    WEIGHTS_INDEX_NAME as WEIGHTS_INDEX_NAME,
    WEIGHTS_NAME as WEIGHTS_NAME,
    WEIGHTS_PATTERN_NAME as WEIGHTS_PATTERN_NAME,
)
from accelerate_nb.runtime.checkpoints.merge import merge_fsdp_weights as merge_fsdp_weights
from accelerate_nb.runtime.checkpoints.weights import parse_size as convert_file_size_to_int
from accelerate_nb.runtime.compat.basic_config import write_basic_config as write_basic_config
from accelerate_nb.runtime.compat.constants import (
    MITA_PROFILING_AVAILABLE_PYTORCH_VERSION as MITA_PROFILING_AVAILABLE_PYTORCH_VERSION,
    PROFILE_PATTERN_NAME as PROFILE_PATTERN_NAME,
    TORCH_DISTRIBUTED_OPERATION_TYPES as TORCH_DISTRIBUTED_OPERATION_TYPES,
    TORCH_LAUNCH_PARAMS as TORCH_LAUNCH_PARAMS,
    XPU_PROFILING_AVAILABLE_PYTORCH_VERSION as XPU_PROFILING_AVAILABLE_PYTORCH_VERSION,
)
from accelerate_nb.runtime.compat.device_support import (
    get_current_device_type as get_current_device_type,
    is_bf16_available as is_bf16_available,
    is_cuda_available as is_cuda_available,
    is_fp16_available as is_fp16_available,
    is_habana_gaudi1 as is_habana_gaudi1,
    is_hpu_available as is_hpu_available,
    is_mlu_available as is_mlu_available,
    is_mps_available as is_mps_available,
    is_musa_available as is_musa_available,
    is_neuron_available as is_neuron_available,
    is_npu_available as is_npu_available,
    is_pippy_available as is_pippy_available,
    is_rocm_available as is_rocm_available,
    is_sdaa_available as is_sdaa_available,
    is_torch_xla_available as is_torch_xla_available,
    is_transformer_engine_mxfp8_available as is_transformer_engine_mxfp8_available,
    is_weights_only_available as is_weights_only_available,
    is_xccl_available as is_xccl_available,
    is_xpu_available as is_xpu_available,
)
from accelerate_nb.runtime.compat.enums import (
    ComputeEnvironment as ComputeEnvironment,
    CustomDtype as CustomDtype,
    DDPCommunicationHookType as DDPCommunicationHookType,
    DistributedType as DistributedType,
    DynamoBackend as DynamoBackend,
    LoggerType as LoggerType,
    PrecisionType as PrecisionType,
    RNGType as RNGType,
)
from accelerate_nb.runtime.compat.env_vars import (
    are_libraries_initialized as are_libraries_initialized,
    clear_environment as clear_environment,
    convert_dict_to_env_variables as convert_dict_to_env_variables,
    get_cpu_distributed_information as get_cpu_distributed_information,
    get_int_from_env as get_int_from_env,
    parse_choice_from_env as parse_choice_from_env,
    parse_flag_from_env as parse_flag_from_env,
    patch_environment as patch_environment,
    purge_accelerate_environment as purge_accelerate_environment,
    str_to_bool as str_to_bool,
)
from accelerate_nb.runtime.compat.formatting import (
    check_os_kernel as check_os_kernel,
    convert_bytes as convert_bytes,
    get_pretty_name as get_pretty_name,
    is_port_in_use as is_port_in_use,
    merge_dicts as merge_dicts,
    recursive_getattr as recursive_getattr,
)
from accelerate_nb.runtime.compat.kwargs_handlers import (
    AutocastKwargs as AutocastKwargs,
    DataLoaderConfiguration as DataLoaderConfiguration,
    DistributedDataParallelKwargs as DistributedDataParallelKwargs,
    GradientAccumulationPlugin as GradientAccumulationPlugin,
    GradScalerKwargs as GradScalerKwargs,
    InitProcessGroupKwargs as InitProcessGroupKwargs,
    KwargsHandler as KwargsHandler,
    ProjectConfiguration as ProjectConfiguration,
)
from accelerate_nb.runtime.compat.nvidia_smi import (
    check_cuda_fp8_capability as check_cuda_fp8_capability,
    check_cuda_p2p_ib_support as check_cuda_p2p_ib_support,
    get_gpu_info as get_gpu_info,
)
from accelerate_nb.runtime.compat.packages import (
    is_4bit_bnb_available as is_4bit_bnb_available,
    is_8bit_bnb_available as is_8bit_bnb_available,
    is_aim_available as is_aim_available,
    is_amdsmi_available as is_amdsmi_available,
    is_bitsandbytes_multi_backend_available as is_bitsandbytes_multi_backend_available,
    is_bnb_available as is_bnb_available,
    is_boto3_available as is_boto3_available,
    is_clearml_available as is_clearml_available,
    is_comet_ml_available as is_comet_ml_available,
    is_datasets_available as is_datasets_available,
    is_deepspeed_available as is_deepspeed_available,
    is_dvclive_available as is_dvclive_available,
    is_fp8_available as is_fp8_available,
    is_import_timer_available as is_import_timer_available,
    is_lomo_available as is_lomo_available,
    is_matplotlib_available as is_matplotlib_available,
    is_megatron_lm_available as is_megatron_lm_available,
    is_mlflow_available as is_mlflow_available,
    is_msamp_available as is_msamp_available,
    is_pandas_available as is_pandas_available,
    is_peft_available as is_peft_available,
    is_pynvml_available as is_pynvml_available,
    is_pytest_available as is_pytest_available,
    is_rich_available as is_rich_available,
    is_sagemaker_available as is_sagemaker_available,
    is_schedulefree_available as is_schedulefree_available,
    is_swanlab_available as is_swanlab_available,
    is_tensorboard_available as is_tensorboard_available,
    is_timm_available as is_timm_available,
    is_torchao_available as is_torchao_available,
    is_torchdata_available as is_torchdata_available,
    is_torchdata_stateful_dataloader_available as is_torchdata_stateful_dataloader_available,
    is_torchvision_available as is_torchvision_available,
    is_trackio_available as is_trackio_available,
    is_transformer_engine_available as is_transformer_engine_available,
    is_transformers_available as is_transformers_available,
    is_triton_available as is_triton_available,
    is_wandb_available as is_wandb_available,
    torchao_required as torchao_required,
)
from accelerate_nb.runtime.compat.save import (
    clean_state_dict_for_safetensors as clean_state_dict_for_safetensors,
    load as load,
    save as save,
    wait_for_everyone as wait_for_everyone,
)
from accelerate_nb.runtime.compat.unsupported.deepspeed import (
    DeepSpeedPlugin as DeepSpeedPlugin,
    DummyOptim as DummyOptim,
    DummyScheduler as DummyScheduler,
    deepspeed_required as deepspeed_required,
)
from accelerate_nb.runtime.compat.unsupported.fsdp import (
    FullyShardedDataParallelPlugin as FullyShardedDataParallelPlugin,
    disable_fsdp_ram_efficient_loading as disable_fsdp_ram_efficient_loading,
    enable_fsdp_ram_efficient_loading as enable_fsdp_ram_efficient_loading,
    ensure_weights_retied as ensure_weights_retied,
    fsdp2_apply_ac as fsdp2_apply_ac,
    fsdp2_canonicalize_names as fsdp2_canonicalize_names,
    fsdp2_load_full_state_dict as fsdp2_load_full_state_dict,
    fsdp2_prepare_model as fsdp2_prepare_model,
    fsdp2_switch_optimizer_parameters as fsdp2_switch_optimizer_parameters,
    get_fsdp2_grad_scaler as get_fsdp2_grad_scaler,
    load_fsdp_model as load_fsdp_model,
    load_fsdp_optimizer as load_fsdp_optimizer,
    save_fsdp_model as save_fsdp_model,
    save_fsdp_optimizer as save_fsdp_optimizer,
)
from accelerate_nb.runtime.compat.unsupported.megatron import (
    AbstractTrainStep as AbstractTrainStep,
    BertTrainStep as BertTrainStep,
    GPTTrainStep as GPTTrainStep,
    MegatronLMDummyDataLoader as MegatronLMDummyDataLoader,
    MegatronLMDummyScheduler as MegatronLMDummyScheduler,
    MegatronLMPlugin as MegatronLMPlugin,
    T5TrainStep as T5TrainStep,
    add_model_config_to_megatron_parser as add_model_config_to_megatron_parser,
    avg_losses_across_data_parallel_group as avg_losses_across_data_parallel_group,
)
from accelerate_nb.runtime.compat.versions import (
    compare_versions as compare_versions,
    is_torch_version as is_torch_version,
)
from accelerate_nb.runtime.observability.profiling import ProfileKwargs as ProfileKwargs
from accelerate_nb.runtime.parallelism_config import (
    DeepSpeedSequenceParallelConfig as DeepSpeedSequenceParallelConfig,
    ParallelismConfig as ParallelismConfig,
    TorchContextParallelConfig as TorchContextParallelConfig,
    TorchTensorParallelConfig as TorchTensorParallelConfig,
    TorchTensorParallelPlugin as TorchTensorParallelPlugin,
)
from accelerate_nb.runtime.precision.fp8_ao import (
    AORecipeKwargs as AORecipeKwargs,
    convert_model_to_fp8_ao as convert_model_to_fp8_ao,
    filter_first_and_last_linear_layers as filter_first_and_last_linear_layers,
    has_ao_layers as has_ao_layers,
)
from accelerate_nb.runtime.precision.fp8_msamp import (
    FP8RecipeKwargs as FP8RecipeKwargs,
    MSAMPRecipeKwargs as MSAMPRecipeKwargs,
)
from accelerate_nb.runtime.precision.fp8_te import (
    TERecipeKwargs as TERecipeKwargs,
    apply_fp8_autowrap as apply_fp8_autowrap,
    contextual_fp8_autocast as contextual_fp8_autocast,
    convert_model as convert_model,
    has_transformer_engine_layers as has_transformer_engine_layers,
)
from accelerate_nb.runtime.training.compile import (
    TorchDynamoPlugin as TorchDynamoPlugin,
    compile_regions as compile_regions,
    compile_regions_in_place as compile_regions_deepspeed,
    compile_regions_in_place as compile_regions_fsdp2,
    has_compiled_regions as has_compiled_regions,
    is_compiled_module as is_compiled_module,
)
from accelerate_nb.runtime.training.memory import (
    find_executable_batch_size as find_executable_batch_size,
    release_memory as release_memory,
)
from accelerate_nb.runtime.training.module_tree import (
    get_model_tp_size as get_model_tp_size,
    get_module_children_bottom_up as get_module_children_bottom_up,
    model_has_dtensor as model_has_dtensor,
)
from accelerate_nb.runtime.training.unwrap import extract_model_from_parallel as extract_model_from_parallel
from accelerate_nb.runtime.world.numa_affinity import set_numa_affinity as set_numa_affinity
from accelerate_nb.runtime.world.prepare_for_launch import PrepareForLaunch as PrepareForLaunch
from accelerate_nb.utils.modeling import (
    align_module_device as align_module_device,
    calculate_maximum_sizes as calculate_maximum_sizes,
    check_device_map as check_device_map,
    check_tied_parameters_in_config as check_tied_parameters_in_config,
    check_tied_parameters_on_same_device as check_tied_parameters_on_same_device,
    compute_module_sizes as compute_module_sizes,
    dtype_byte_size as dtype_byte_size,
    find_tied_parameters as find_tied_parameters,
    get_balanced_memory as get_balanced_memory,
    get_grad_scaler as get_grad_scaler,
    get_max_layer_size as get_max_layer_size,
    get_max_memory as get_max_memory,
    get_mixed_precision_context_manager as get_mixed_precision_context_manager,
    has_offloaded_params as has_offloaded_params,
    id_tensor_storage as id_tensor_storage,
    infer_auto_device_map as infer_auto_device_map,
    is_peft_model as is_peft_model,
    load_checkpoint_in_model as load_checkpoint_in_model,
    load_offloaded_weights as load_offloaded_weights,
    load_state_dict as load_state_dict,
    named_module_tensors as named_module_tensors,
    retie_parameters as retie_parameters,
    set_module_tensor_to_device as set_module_tensor_to_device,
)
from accelerate_nb.utils.offload import (
    OffloadedWeightsLoader as OffloadedWeightsLoader,
    PrefixedDataset as PrefixedDataset,
    extract_submodules_state_dict as extract_submodules_state_dict,
    load_offloaded_weight as load_offloaded_weight,
    offload_state_dict as offload_state_dict,
    offload_weight as offload_weight,
    save_offload_index as save_offload_index,
)
from accelerate_nb.utils.operations import (
    CannotPadNestedTensorWarning as CannotPadNestedTensorWarning,
    ConvertOutputsToFp32 as ConvertOutputsToFp32,
    GatheredParameters as GatheredParameters,
    TensorInformation as TensorInformation,
    broadcast as broadcast,
    broadcast_object_list as broadcast_object_list,
    concatenate as concatenate,
    convert_outputs_to_fp32 as convert_outputs_to_fp32,
    convert_to_fp32 as convert_to_fp32,
    copy_tensor_to_devices as copy_tensor_to_devices,
    find_batch_size as find_batch_size,
    find_device as find_device,
    gather as gather,
    gather_object as gather_object,
    get_data_structure as get_data_structure,
    get_shape as get_shape,
    honor_type as honor_type,
    ignorant_find_batch_size as ignorant_find_batch_size,
    initialize_tensors as initialize_tensors,
    is_namedtuple as is_namedtuple,
    is_tensor_information as is_tensor_information,
    is_torch_tensor as is_torch_tensor,
    is_torch_xpu_tensor as is_torch_xpu_tensor,
    listify as listify,
    pad_across_processes as pad_across_processes,
    pad_input_tensors as pad_input_tensors,
    recursively_apply as recursively_apply,
    reduce as reduce,
    send_to_device as send_to_device,
    slice_tensors as slice_tensors,
)
from accelerate_nb.utils.random import (
    set_seed as set_seed,
    synchronize_rng_state as synchronize_rng_state,
    synchronize_rng_states as synchronize_rng_states,
)
from accelerate_nb.utils.tqdm import tqdm as tqdm
