"""The built-in selectors, one file each."""

from toolkit_plugins.selectors.all import All
from toolkit_plugins.selectors.bottom_error import BottomError
from toolkit_plugins.selectors.density import Density
from toolkit_plugins.selectors.depth import Depth
from toolkit_plugins.selectors.depth_matched import DepthMatched
from toolkit_plugins.selectors.gradient_sensitivity import GradientSensitivity
from toolkit_plugins.selectors.listed import Listed
from toolkit_plugins.selectors.none import NoLayers
from toolkit_plugins.selectors.placement_matched import PlacementMatched
from toolkit_plugins.selectors.random_count import RandomCount
from toolkit_plugins.selectors.random_matched import RandomMatched
from toolkit_plugins.selectors.random_permuted import RandomPermuted
from toolkit_plugins.selectors.random_shuffle_matched import RandomShuffleMatched
from toolkit_plugins.selectors.top_error import TopError
from toolkit_plugins.selectors.weight_norm import WeightNorm

COMPONENTS = [
    All,
    BottomError,
    Density,
    Depth,
    DepthMatched,
    GradientSensitivity,
    Listed,
    NoLayers,
    PlacementMatched,
    RandomCount,
    RandomMatched,
    RandomPermuted,
    RandomShuffleMatched,
    TopError,
    WeightNorm,
]
