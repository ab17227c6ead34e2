"""Collectives over a tuple of mesh axes; () is the identity, so that one code path serves every mesh."""

from .plain import all_gather as all_gather
from .plain import all_to_all as all_to_all
from .plain import pmax as pmax
from .plain import psum as psum
from .plain import reduce_scatter as reduce_scatter
