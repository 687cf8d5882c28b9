"""One worker of an elastic run of Keras; rank 1 of 2 dies, and one takes its place.

low : rank 1 dies after a commit: who stays is in a compressed step, and who comes in a dense one
cast : it dies within a step, in a collective that hvd.elastic.run does not know

Second argument: a file that says that it has died. Horovod's own TensorFlowState broadcasts while
it is built, where those that stay do not, so a new rank would wait forever: the state is ours.
"""

import os
import signal
import sys
from pathlib import Path

import horovod.tensorflow as hvd
import keras
import tensorflow as tf
from horovod.common.elastic import ObjectState
from tensors import SIDE, assert_equal_ranks, noise

from sn_compress import CastCompression, LowRankCompression
from sn_compress.tensorflow.keras import DistributedOptimizer

WAYS = {
    "low": LowRankCompression.using(warmup=2, ratio=10, every=7),
    "cast": CastCompression.using(dtype="fp8"),
}
MARK = Path(sys.argv[2])
hvd.init()
tf.config.threading.set_intra_op_parallelism_threads(1)
layers = [keras.layers.Dense(SIDE, "tanh") for _ in range(3)]
model = keras.Sequential([keras.Input((SIDE,)), *layers])
optimizer = DistributedOptimizer(keras.optimizers.SGD(0.1), compression=WAYS[sys.argv[1]])
optimizer.build(model.trainable_variables)
model.compile(optimizer, "mse")
variables = [variable.value for variable in (*model.variables, *optimizer.variables)]


class State(ObjectState):
    """Variables, and what an ObjectState keeps."""

    def save(self):
        self.values = [variable.numpy() for variable in variables]
        super().save()

    def restore(self):
        for variable, value in zip(variables, self.values, strict=True):
            variable.assign(value)
        super().restore()

    def sync(self):
        hvd.broadcast_variables(variables, root_rank=0)
        super().sync()
        self.save()


def die(*_, **__):
    MARK.write_text("")
    os.kill(os.getpid(), signal.SIGKILL)


@hvd.elastic.run
def train(state):
    while state.step < 30:
        if state.step == 17 and hvd.rank() == 1 and not MARK.exists():
            if sys.argv[1] == "cast":
                hvd.alltoall = die
            else:
                die()
        inputs = noise(8, SIDE, seed=state.step)
        model.train_on_batch(inputs, inputs)
        state.step += 1
        if state.step % 5 == 0:
            state.commit()
    assert_equal_ranks(variables)
    print(f"ok ended with {hvd.size()} ranks", flush=True)


train(State(bcast_object=hvd.broadcast_object, get_rank=hvd.rank, step=0))
