"""TensorFlow and Keras rims, over Horovod, one file per integration point.

May import TensorFlow, Keras, Horovod and all of the core, but no other package; nothing imports it.
This file loads none of them; every module here needs Horovod.
"""

from ..errors import need

need("tensorflow", "sn_compress.tensorflow")
need("horovod", "sn_compress.tensorflow")
