# Public names, a line each: `__init__.py` loads them from here on first use, editors and type
# checkers read them.

from .attention.api import attention_for as attention_for
from .attention.api import merge_partials as merge_partials
from .attention.api import paged_attention as paged_attention
from .attention.api import sliding_window_attention as sliding_window_attention
from .attention.api import workspace_numel as workspace_numel
from .common.latent_pages import IndexPages as IndexPages
from .common.latent_pages import LatentPages as LatentPages
from .common.latent_pages import page_bytes as page_bytes
from .compressor import compress as compress
from .hyper_connections import collapse_streams as collapse_streams
from .hyper_connections import expand_streams as expand_streams
from .indexer.api import index_topk as index_topk
from .indexer.api import index_topk_workspace_numel as index_topk_workspace_numel
from .latent.api import compressed_attention as compressed_attention
from .latent.api import compressed_attention_workspace_numel as compressed_attention_workspace_numel
from .latent.api import mla_attention as mla_attention
from .latent.flash_mla import flash_mla_with_kvcache as flash_mla_with_kvcache
from .latent_write import write_latent as write_latent
from .layers.experts import expert_mlp as expert_mlp
from .layers.gating import gated_product as gated_product
from .layers.norm import residual_norm as residual_norm
from .layers.rope import norm_rope as norm_rope
from .layers.routing import combine_experts as combine_experts
from .layers.routing import route_tokens as route_tokens
from .layers.sampling import sample_tokens as sample_tokens
from .overlap import copy_overlap as copy_overlap
from .pages import PoolPages as PoolPages
from .pages import gather_pages as gather_pages
from .pages import scatter_pages as scatter_pages
from .pages import write_kv as write_kv
