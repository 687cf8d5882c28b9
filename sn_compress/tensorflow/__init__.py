"""The rims of TensorFlow and Keras: tensors in, tensors out, one file for one seam.

May import TensorFlow, Keras, Horovod and all of the core; no other room, and nothing imports it.
This file loads none of them: every rim here needs Horovod.
"""

from ..errors import need

need("tensorflow", "sn_compress.tensorflow")
need("horovod", "sn_compress.tensorflow")
