"""Routers, one a file, and the losses on what they decide."""

from .losses import load_balance as load_balance
from .losses import router_z as router_z
from .topk import TopK as TopK
