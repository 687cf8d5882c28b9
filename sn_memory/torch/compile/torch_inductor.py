"""What is used of Inductor, whose names are private and change with torch: all of it, in one place.

Torch's own modules use what torch has deprecated, and warn when they are imported.
"""

from __future__ import annotations

import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    from torch._inductor import async_compile
    from torch._inductor import config as inductor_config
    from torch._inductor.codegen.common import init_backend_registration
    from torch._inductor.compile_fx import (
        _InProcessFxCompile,
        compile_fx,
        get_input_idxs_to_check,
    )
    from torch._inductor.custom_graph_pass import CustomPartitionerFn, get_hash_for_files
    from torch._inductor.debug import DebugContext
    from torch._inductor.graph import GraphLowering
    from torch._inductor.runtime.cache_dir_utils import cache_dir
    from torch._inductor.virtualized import V

__all__ = [
    "CustomPartitionerFn",
    "DebugContext",
    "GraphLowering",
    "V",
    "_InProcessFxCompile",
    "async_compile",
    "cache_dir",
    "compile_fx",
    "get_hash_for_files",
    "get_input_idxs_to_check",
    "inductor_config",
    "init_backend_registration",
]
