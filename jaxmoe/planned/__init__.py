"""Layers and models run as a plan says: what each task does on one device's arrays, and the shard_map around it."""

from .blocks import attention_block as attention_block
from .blocks import moe_block as moe_block
from .layer import layer_plan as layer_plan
from .layer import planned_layer as planned_layer
