"""Collectives over a tuple of mesh axes; () is the identity, so that one code path serves every mesh."""

from .compressed import Counters as Counters
from .compressed import added as added
from .compressed import all_gather as all_gather
from .compressed import all_reduce as all_reduce
from .compressed import all_to_all as all_to_all
from .compressed import no_counters as no_counters
from .compressed import reduce_scatter as reduce_scatter
from .plain import group_size as group_size
from .plain import own_part as own_part
from .plain import pmax as pmax
from .plain import psum as psum
from .stepwise import all_to_all_gather as all_to_all_gather
from .turns import after as after
from .turns import turn as turn
