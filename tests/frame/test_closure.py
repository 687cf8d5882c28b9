"""How much of sn_memory a user reads who makes one plan and runs one step: modules imported for it.

A cap falls with every change that needs fewer modules, and never rises. Reports, torch.compile,
state on the host, activations, policies, apoptosis and choices by modules are other concerns: they
are imported when they are asked for.
"""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MOST_MODULES = {"torch": 92, "tensorflow": 65}
STEPS = {
    "torch": """
import torch
import sn_memory.torch
layers = [layer for _ in range(4) for layer in (torch.nn.Linear(64, 64), torch.nn.Tanh())]
model, sample = torch.nn.Sequential(*layers), torch.randn(512, 64)
planned = sn_memory.torch.plan(model, sample, "90%", backend="graph")
planned(sample).square().mean().backward()
""",
    "tensorflow": """
import tensorflow as tf
import sn_memory.tensorflow
layers = [tf.keras.layers.Dense(64, "tanh") for _ in range(4)]
model = tf.keras.Sequential([tf.keras.Input((64,)), *layers])
sample = tf.random.normal((512, 64))
planned = sn_memory.tensorflow.plan(model, sample, "90%", backend="graph")
with tf.GradientTape() as tape:
    loss = tf.reduce_mean(planned(sample, training=True) ** 2)
tape.gradient(loss, model.trainable_variables)
""",
}
OURS = """
import sys
print(*sorted(name for name in sys.modules if name.partition(".")[0].startswith("sn_")))
"""


@pytest.mark.parametrize("framework", STEPS)
def test_one_plan_and_one_step_import_few_modules(framework):
    pytest.importorskip(framework)
    code = STEPS[framework] + OURS
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    modules = done.stdout.split()
    print(f"\n{framework}: {len(modules)} modules, at most {MOST_MODULES[framework]}")
    assert len(modules) <= MOST_MODULES[framework], modules
    assert not [name for name in modules if name.startswith("sn_compress")]
