"""The built-in tasks, one file each."""

from toolkit_plugins.tasks.arc_challenge import ARCChallenge
from toolkit_plugins.tasks.arc_easy import ARCEasy
from toolkit_plugins.tasks.arithmetic import Arithmetic
from toolkit_plugins.tasks.boolq import BoolQ
from toolkit_plugins.tasks.commonsense import Commonsense
from toolkit_plugins.tasks.copa import COPA
from toolkit_plugins.tasks.gsm8k import GSM8K
from toolkit_plugins.tasks.lm_eval import LMEval
from toolkit_plugins.tasks.metamathqa import MetaMathQA
from toolkit_plugins.tasks.rte import RTE
from toolkit_plugins.tasks.samsum import SAMSum
from toolkit_plugins.tasks.scienceqa import ScienceQA
from toolkit_plugins.tasks.squad import SQuAD
from toolkit_plugins.tasks.sst2 import SST2
from toolkit_plugins.tasks.wic import WiC
from toolkit_plugins.tasks.wikitext2 import WikiText2
from toolkit_plugins.tasks.winogrande import WinoGrande
from toolkit_plugins.tasks.wsc import WSC

COMPONENTS = [
    ARCChallenge,
    ARCEasy,
    Arithmetic,
    BoolQ,
    COPA,
    Commonsense,
    GSM8K,
    LMEval,
    MetaMathQA,
    RTE,
    SAMSum,
    SQuAD,
    SST2,
    ScienceQA,
    WSC,
    WiC,
    WikiText2,
    WinoGrande,
]
