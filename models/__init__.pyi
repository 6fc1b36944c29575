# Public names, a line each: `__init__.py` loads them from here on first use, editors and type
# checkers read them.

from .chat import ChatTemplate as ChatTemplate
from .config.hf import from_hf as from_hf
from .config.model import ModelConfig as ModelConfig
from .config.named import CONFIGS as CONFIGS
from .config.named import get_config as get_config
from .deepseek_v4.drafters import DSparkDrafter as DSparkDrafter
from .deepseek_v4.drafters import MTPDrafter as MTPDrafter
from .engine.config import EngineConfig as EngineConfig
from .engine.engine import Engine as Engine
from .engine.memory import MemoryPlan as MemoryPlan
from .engine.outputs import OutputDelta as OutputDelta
from .engine.outputs import RequestOutput as RequestOutput
from .engine.outputs import TokenLogprobs as TokenLogprobs
from .engine.request import SamplingParams as SamplingParams
from .engine.speculative import NGramDrafter as NGramDrafter
from .families.decoder import Decoder as Decoder
from .families.gemma import Gemma as Gemma
from .families.gemma4_assistant import Gemma4Drafter as Gemma4Drafter
from .families.gemma4_assistant import load_assistant as load_assistant
from .families.gpt_oss import GptOss as GptOss
from .families.llama import Llama as Llama
from .families.registry import Family as Family
from .families.registry import register_family as register_family
from .layers.kv_cache import cache_groups as cache_groups
from .llm import LLM as LLM
from .loading.random_weights import random_model as random_model
from .loading.weights import load_model as load_model
from .parallel.heartbeat import RankError as RankError
