"""The engine of this image takes itself for an older one."""

import sys
import types

version = types.ModuleType("sglang._version")
version.__dict__.update(__version__="0.5.6", __version_tuple__=(0, 5, 6))
sys.modules["sglang._version"] = version
