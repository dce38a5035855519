"""The import path `accelerate.utils.operations`: work on nested tensors under Hugging Face's module name."""

from accelerate_nb.errors import OperationError as DistributedOperationException
from accelerate_nb.runtime.compat.constants import (
    TORCH_DISTRIBUTED_OPERATION_TYPES as TORCH_DISTRIBUTED_OPERATION_TYPES,
)
from accelerate_nb.runtime.operations.collective import (
    TENSOR_INT_TO_DTYPE as TENSOR_INT_TO_DTYPE,
    TENSOR_TYPE_TO_INT as TENSOR_TYPE_TO_INT,
    CannotPadNestedTensorWarning as CannotPadNestedTensorWarning,
    GatheredParameters as GatheredParameters,
    broadcast as broadcast,
    broadcast_object_list as broadcast_object_list,
    chained_operation as chained_operation,
    copy_tensor_to_devices as copy_tensor_to_devices,
    gather as gather,
    gather_object as gather_object,
    gather_tensor_shape as gather_tensor_shape,
    pad_across_processes as pad_across_processes,
    pad_input_tensors as pad_input_tensors,
    reduce as reduce,
    verify_operation as verify_operation,
)
from accelerate_nb.runtime.operations.nested import (
    ConvertOutputsToFp32 as ConvertOutputsToFp32,
    TensorInformation as TensorInformation,
    concatenate as concatenate,
    convert_outputs_to_fp32 as convert_outputs_to_fp32,
    convert_to_fp32 as convert_to_fp32,
    find_batch_size as find_batch_size,
    find_device as find_device,
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
    recursively_apply as recursively_apply,
    send_to_device as send_to_device,
    slice_tensors as slice_tensors,
)
