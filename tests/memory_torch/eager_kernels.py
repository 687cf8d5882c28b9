"""Inductor without its compilers: the graphs it would be given, run call by call."""

import importlib


def compile_fx(module, inputs, config_patches=None):
    """Do as torch._inductor.compile_fx.compile_fx, partitioner included."""
    common = importlib.import_module("torch._dynamo.backends.common")
    debugging = importlib.import_module("torch._dynamo.backends.debugging")
    partitioners = importlib.import_module("torch._functorch.partitioners")
    patches = config_patches or {}
    cut = patches.get("custom_partitioner_fn", partitioners.min_cut_rematerialization_partition)
    backend = common.aot_autograd(
        fw_compiler=debugging.boxed_nop,
        partition_fn=cut,
        keep_inference_input_mutations=True,
    )
    return backend(module, inputs)
