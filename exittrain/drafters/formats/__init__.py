"""Heads on disk: EAGLE-3 heads and block drafters as other projects store them, read and written.

Three forms, told apart by config.json: `speculators` (of vLLM's library, kinds eagle3 and dflash; also how our own
drafters are saved), `sglang` (the flat form of EAGLE and SGLang) and `dflash` (z-lab's block drafters). Inside, tensor
names are those of speculators and feature layers are indices of `hidden_states`; both are converted here alone.
"""

from exittrain.drafters.formats.read import HeadCheckpoint as HeadCheckpoint
from exittrain.drafters.formats.read import is_head_folder as is_head_folder
from exittrain.drafters.formats.read import read_head as read_head
from exittrain.drafters.formats.write import write_head as write_head
