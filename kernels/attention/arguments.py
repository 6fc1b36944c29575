"""Named tuples that the kernels of paged attention take as arguments and hand on."""

from typing import Any, NamedTuple


class TileConfig(NamedTuple):
    """Compile-time constants of a query tile; one ``tl.constexpr`` argument.

    Attributes:
        HEAD_DIM: channels of a query and of a key.
        VALUE_DIM: channels of a value that a program computes.
        GROUP: query heads of one KV head.
        BLOCK_Q: tokens of a query tile.
        HEADS: query heads of a query tile.
        HEAD_TILES: query tiles that hold the heads of one KV head.
        BLOCK_SIZE: rows of a page.
        BLOCK_M: rows of a query tile, at least BLOCK_Q * HEADS.
        BLOCK_N: keys of a tile.
        WRAP: as in `query_tiles.load_page`.
        MASK_ALL: whether all tiles of keys are masked, those that every row sees whole, too.
        EQUAL_STRIDES: whether rows of keys lie as far apart as rows of values, in the pages and
            among the new rows.
        SCALES: what scales of quantized pages are: "none", "number", "tensor" (of one number) or
            "rows".
        HARDWARE_E4M3: whether there is an instruction that widens e4m3.
        HALF: whether quantized values, and the queries with them, become fp16 instead of what the
            queries are.
        PTX: whether quantized values are widened by more than the interpreter knows.
        PAGED_CONTEXT: whether the keys in the pages are those before the step alone, which every
            row sees.
        DIVIDE: whether warps have to be made to divide the scores of a tile.
    """

    HEAD_DIM: Any
    VALUE_DIM: Any
    GROUP: Any
    BLOCK_Q: Any
    HEADS: Any
    HEAD_TILES: Any
    BLOCK_SIZE: Any
    BLOCK_M: Any
    BLOCK_N: Any
    WRAP: Any
    MASK_ALL: Any
    EQUAL_STRIDES: Any
    SCALES: Any
    HARDWARE_E4M3: Any
    HALF: Any
    PTX: Any
    PAGED_CONTEXT: Any
    DIVIDE: Any


class Softmax(NamedTuple):
    """What a score becomes, and which keys count.

    Attributes:
        sliding_window: keys that a query sees, its own included; None: all before it.
        inner_scale: factor of q . k; without outer_scale to log2 units.
        outer_scale: factor of tanh, to log2 units; None: there is no soft cap.
    """

    sliding_window: Any
    inner_scale: Any
    outer_scale: Any


class QueryTile(NamedTuple):
    """The rows of a query tile.

    Attributes:
        q: [BLOCK_M, HEAD_DIM].
        token: [BLOCK_M], each row's token in its sequence's step.
        first, last: the first and the last of them.
        context: keys of the sequence before the step.
    """

    q: Any
    token: Any
    first: Any
    last: Any
    context: Any


class KeySplit(NamedTuple):
    """Paged keys [low, high) of a KV split, and whether it is the last, which has the new rows."""

    low: Any
    high: Any
    is_last: Any


class Tiles(NamedTuple):
    """Tensor descriptors of tiles of all new keys and values, and where the sequence's and the
    head's begin: its first row and its first columns."""

    k: Any
    v: Any
    first_token: Any
    k_column: Any
    v_column: Any


class Source(NamedTuple):
    """Where the keys and values of one head lie: in pages, or as new rows of one sequence.

    Attributes:
        k, v: pointers to the first page or row; the strides of pages and rows follow.
        table, width: the sequence's block table and its entries; None and 1 for new rows.
        scales: ``Scales`` of each row, or None.
        tiles: ``Tiles``, or None. They copy whole tiles, pointers copy the others: a descriptor's
            masks are the tensor's edges, and a row past the sequence's is another's, which may be
            NaN.
    """

    k: Any
    v: Any
    k_stride_page: Any
    k_stride_row: Any
    v_stride_page: Any
    v_stride_row: Any
    table: Any
    width: Any
    scales: Any
    tiles: Any


class Span(NamedTuple):
    """Keys [low, high) of a source that some row of the query tile sees.

    Attributes:
        open_low, open_high: keys [open_low, open_high) that every row sees.
        row_low, row_high: the first and the last key that each row sees; row_low None: any.
    """

    low: Any
    high: Any
    open_low: Any
    open_high: Any
    row_low: Any
    row_high: Any


class Walk(NamedTuple):
    """``count`` tiles of keys from tile ``first`` on; behind ``head_count`` of them ``gap`` tiles
    are left out."""

    first: Any
    count: Any
    head_count: Any
    gap: Any
