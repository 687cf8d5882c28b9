"""Train a small convolutional net with Keras within a memory budget; print what it saved.

    python examples/tensorflow_memory.py [--budget 60%] [--steps 20] [--batch 64]

The images are random, but their labels can be learned. The losses of the planned and the plain run
are the same except for the rounding of ops that TensorFlow fuses in the plain one.
"""

import argparse
import time

import keras
import tensorflow as tf

import sn_memory.tensorflow
from sn_memory.base.sizes import show_bytes


def network():
    """Return eight convolutions with batch norm."""
    keras.utils.set_random_seed(0)
    layers, before = [keras.Input((28, 28, 1))], 1
    for width in (32, 32, 32, 32, 64, 64, 64, 64):
        stride = 2 if width > before > 1 else 1
        layers += [
            keras.layers.Conv2D(width, 3, stride, "same", use_bias=False),
            keras.layers.BatchNormalization(),
            keras.layers.ReLU(),
        ]
        before = width
    layers += [keras.layers.Flatten(), keras.layers.Dropout(0.1, seed=1), keras.layers.Dense(10)]
    return keras.Sequential(layers)


def batches(steps, batch):
    """Make random images whose label, the brightest of ten columns, can be learned."""
    images = tf.random.stateless_uniform((steps * batch, 28, 28, 1), (0, 0))
    labels = tf.argmax(tf.reduce_mean(images[:, :, 4:24:2, 0], 1), 1)
    return tf.data.Dataset.from_tensor_slices((images, labels)).batch(batch, drop_remainder=True)


def train(model, steps, batch):
    model.compile(
        keras.optimizers.SGD(0.002, momentum=0.9),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        jit_compile=False,
    )
    began = time.perf_counter()
    history = model.fit(batches(steps, batch), epochs=2, verbose=0)
    return history.history["loss"], time.perf_counter() - began


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--budget", default="60%")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=64)
    args = parser.parse_args()

    images, _ = next(iter(batches(1, args.batch)))
    estimate = sn_memory.tensorflow.estimate(network(), images, optimizer="sgd")
    print(f"{estimate}\nlargest batch in 1 GiB: {estimate.largest_batch('1GiB')}\n")

    planned = sn_memory.tensorflow.plan(network(), images, args.budget, time_limit_s=10)
    print(f"{sn_memory.tensorflow.verify(planned, images)}\n")

    plain_losses, plain_s = train(network(), args.steps, args.batch)
    losses, planned_s = train(planned, args.steps, args.batch)
    difference = max(abs(one / other - 1) for one, other in zip(losses, plain_losses, strict=True))
    assert difference < 1e-3
    plan = planned.sn_memory.plan
    before, after = show_bytes(plan.baseline_peak_bytes), show_bytes(plan.peak_bytes)
    print(
        f"2 epochs of {args.steps} steps, loss {losses[0]:.3f} -> {losses[-1]:.3f}, "
        f"{difference:.1e} apart\npeak {before} -> {after}, "
        f"{plain_s:.1f} s -> {planned_s:.1f} s, tracing included"
    )


if __name__ == "__main__":
    main()
