"""Networks as torch modules, written from their papers; parameter counts are tested.

from models import resnet
model = resnet(50)      # torch.nn.Module
"""

from .densenet import densenet121
from .inception import InceptionV3
from .mobilenet import mobilenet_v3_small
from .resnet import resnet
from .transformers import Bert, Gpt2, Llama
from .unet import UNet
from .vgg import vgg16

__all__ = [
    "Bert", "Gpt2", "InceptionV3", "Llama", "UNet", "densenet121", "mobilenet_v3_small", "resnet",
    "vgg16",
]  # fmt: skip
