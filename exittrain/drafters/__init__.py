from exittrain.drafters.causal import Drafter as Drafter
from exittrain.drafters.causal import DraftState as DraftState
from exittrain.drafters.layers import copy_layers as copy_layers
from exittrain.drafters.load import load_drafter as load_drafter
from exittrain.drafters.scratch import make_causal_lm as make_causal_lm
