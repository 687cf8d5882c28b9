"""One rank of a run in which rank 1 is killed after 5 steps."""

import os
import signal

import horovod.tensorflow as hvd
import tensorflow as tf

from sn_compress import FFTCompression

gather = FFTCompression.using()
hvd.init()
# The launcher ends the others as soon as one is dead: they are to learn it by themselves.
signal.signal(signal.SIGTERM, signal.SIG_IGN)
variable = tf.Variable(tf.ones([256, 256]))


@tf.function
def step(x):
    with hvd.DistributedGradientTape(tf.GradientTape(), compression=gather) as tape:
        loss = tf.reduce_mean((x @ variable) ** 2)
    variable.assign_sub(0.1 * tape.gradient(loss, [variable])[0])


for i in range(1000):
    if hvd.rank() == 1 and i == 5:
        os.kill(os.getpid(), signal.SIGKILL)
    step(tf.random.normal([8, 256]))
    if i == 4:
        print("reached the bad step", flush=True)
    if i == 5:
        print("finished the bad step", flush=True)
