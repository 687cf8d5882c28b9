"""Plans for a GPU keep budgets of what TensorFlow's allocator reserves; that on paper and run."""

import subprocess
import sys
from types import SimpleNamespace

import pytest
import tensorflow as tf
from keras_samples import dense, step_of

import sn_memory.tensorflow
from sn_memory import BudgetError
from sn_memory.cost.bfc import BFCSettings
from sn_memory.cost.devices import named
from sn_memory.run.reserved import reserved
from sn_memory.tensorflow import target

# The CPU's allocator is the same one, with memory growth and without garbage collection, for blocks
# above 256 KiB, where TensorFlow has oneDNN. What is in use tells which block each request took.
COMPARE = """
import os, random, sys
seed, limit = int(sys.argv[1]), int(sys.argv[2])
os.environ["TF_ENABLE_ONEDNN_OPTS"] = "1"
os.environ["TF_MKL_ALLOC_MAX_BYTES"] = str(limit)
import tensorflow as tf
from sn_memory.cost.bfc import BFCAllocator, BFCSettings
from sn_memory.tensorflow.memory import has_statistics

def used():
    return tf.config.experimental.get_memory_info("CPU:0")["current"]

def empty(nbytes):
    with tf.device("CPU:0"):
        return tf.raw_ops.Empty(shape=[nbytes], dtype=tf.uint8, init=False)

if used():
    sys.exit("something is held before")
chance, held = random.Random(seed), {}
paper = BFCAllocator(BFCSettings(growth=True, limit_bytes=limit, gives_back=False))
for number in range(600):
    if held and chance.random() < 0.5:
        key = chance.choice(list(held))
        del held[key]
        paper.free(key)
    else:
        sizes = [300_000, 1_000_000, 5_000_000, 40_000_000, 150_000_000]
        nbytes = int(chance.choice(sizes[: 5 if limit >> 32 else 4]) * (1 + chance.random()))
        try:
            paper.allocate(number, nbytes)
        except MemoryError:
            try:
                empty(nbytes)
            except tf.errors.ResourceExhaustedError:
                print("both refused", number)
                break
            sys.exit(f"TensorFlow found room for {nbytes} bytes")
        held[number] = empty(nbytes)
    if used() != paper.allocated_bytes:
        sys.exit(f"{number}: {used()} in use, {paper.allocated_bytes} on paper")
if not has_statistics("CPU:0"):
    print("no statistics")
print("the same", paper.reserved_bytes)
"""


def compared(seed, limit):
    done = subprocess.run(
        [sys.executable, "-c", COMPARE, str(seed), str(limit)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    if "no statistics" in done.stdout:
        pytest.skip("no oneDNN, so that the CPU's allocator is another one")
    assert done.returncode == 0, done.stderr[-500:]
    return done.stdout


def test_every_block_is_as_large_as_tensorflow_hands_it_out():
    assert "the same" in compared(0, 16 << 30)


@pytest.mark.slow  # TensorFlow waits ten seconds before it refuses
def test_what_finds_no_room_is_what_tensorflow_refuses():
    assert "both refused" in compared(0, 400 << 20)


def layers():
    return dense(1024, 12), tf.TensorSpec((8192, 1024))


@pytest.mark.parametrize("growth", ["false", "true"])
def test_a_plan_for_a_named_card_keeps_its_budget_by_what_is_reserved(monkeypatch, growth):
    monkeypatch.setenv("TF_FORCE_GPU_ALLOW_GROWTH", growth)
    model, sample = layers()
    here = sn_memory.tensorflow.plan(model, sample, "60%", profile=False).sn_memory
    assert here.reserved_peak_bytes is None
    assert here.plan.allocator == ""
    budget = here.budget_bytes if growth == "false" else "1500MiB"
    record = sn_memory.tensorflow.plan(model, sample, budget, device="h100").sn_memory
    plan, settings = record.plan, target.bfc_settings("h100")
    assert settings.growth == (growth == "true")
    assert settings.limit_bytes == named("h100").usable_bytes
    assert plan.peak_bytes <= record.reserved_peak_bytes <= record.budget_bytes
    assert record.reserved_peak_bytes == reserved(record.trace.graph, plan, settings).peak_bytes
    assert plan.allocator == settings.name
    assert plan.notes[0].startswith(f"{settings.reserves} ")
    # By live bytes alone the budget was kept, and more was reserved than it.
    if growth == "false":
        assert "where live tensors alone would allow" in plan.notes[0]
    assert f", by {settings.name}" in record.report().replace("&#x27;", "'")


def test_a_step_for_a_named_card(monkeypatch):
    monkeypatch.delenv("TF_FORCE_GPU_ALLOW_GROWTH", raising=False)
    step, sample = step_of(dense(1024, 8, "tanh", use_bias=False)), tf.TensorSpec((8192, 1024))

    def planned(budget, **settings):
        return sn_memory.tensorflow.plan_step(step, sample, budget, profile=False, **settings)

    plan = planned("75%", device="h100").sn_memory.plan
    assert plan.peak_bytes <= plan.reserved_peak_bytes <= plan.budget_bytes
    with pytest.raises(BudgetError) as live:
        planned("1%")
    # What is smallest by live bytes is too little for what is reserved.
    with pytest.raises(BudgetError, match="TensorFlow's allocator needs a region of") as caught:
        planned(live.value.peak_bytes, device="h100")
    assert caught.value.peak_bytes > caught.value.budget_bytes


def test_an_estimate_for_a_named_card_says_what_is_reserved(monkeypatch):
    monkeypatch.delenv("TF_FORCE_GPU_ALLOW_GROWTH", raising=False)
    model, sample = layers()
    assert sn_memory.tensorflow.estimate(model, sample).reserved_bytes == 0
    amount = sn_memory.tensorflow.estimate(model, sample, optimizer="adam", device="h100")
    assert amount.peak_bytes <= amount.reserved_bytes < 1.2 * amount.peak_bytes
    assert "reserved" in str(amount)


def test_settings_of_a_present_card(monkeypatch):
    monkeypatch.setattr(target, "main_device", lambda: "GPU:0")
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda _: ["card"])
    monkeypatch.setattr(tf.config.experimental, "get_memory_growth", lambda gpu: gpu == "card")
    divided = [None]
    monkeypatch.setattr(tf.config, "get_logical_device_configuration", lambda _: divided[-1])
    devices = [SimpleNamespace(device_type=kind, memory_limit=8 << 30) for kind in ("CPU", "GPU")]
    monkeypatch.setattr(target.device_lib, "list_local_devices", lambda: devices)
    for name in ("TF_FORCE_GPU_ALLOW_GROWTH", "TF_ENABLE_GPU_GARBAGE_COLLECTION"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delenv("TF_GPU_ALLOCATOR", raising=False)
    assert target.bfc_settings("h100") == BFCSettings(growth=True, limit_bytes=8 << 30)
    divided.append(["a logical device"])
    assert not target.bfc_settings("h100").growth
    divided.append(None)
    monkeypatch.setenv("TF_FORCE_GPU_ALLOW_GROWTH", "false")
    monkeypatch.setenv("TF_ENABLE_GPU_GARBAGE_COLLECTION", "false")
    assert target.bfc_settings(None) == BFCSettings(limit_bytes=8 << 30, gives_back=False)
    monkeypatch.setenv("TF_FORCE_GPU_ALLOW_GROWTH", "yes")  # TensorFlow takes no such word
    assert target.bfc_settings(None).growth
    monkeypatch.setenv("TF_GPU_ALLOCATOR", "cuda_malloc_async")
    assert not target.bfc_settings(None).caching


def test_an_allocator_of_the_driver_is_noted(monkeypatch):
    monkeypatch.setenv("TF_GPU_ALLOCATOR", "cuda_malloc_async")
    model, sample = layers()
    record = sn_memory.tensorflow.plan(model, sample, "75%", device="h100").sn_memory
    assert record.reserved_peak_bytes is None
    assert "TF_GPU_ALLOCATOR" in record.plan.notes[0]
