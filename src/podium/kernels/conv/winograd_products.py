"""The matrix products between the transforms of `winograd_routines.py`, which calls this: blocks of sums in registers.

The right factor is stored in panels, a panel's row being as wide as a block's row of sums: what a block reads lies side
by side, whatever the number of columns, and stays in the first cache while the rows of the left one pass by.

    left (rows, inner), right (inner, columns), target (rows, columns)
"""

from podium.kernels.jit.llvm import FLOAT, WIDTH, Code, Value, number

#: sums that stay in registers: this many rows by a panel's vectors, or by one; AVX-512 has twice as many registers
_ROWS, _ROWS_OF_ONE = (14, 24) if WIDTH == 16 else (6, 12)
#: columns of a panel; the last one has the rest
PANEL = 2 * WIDTH


def apart(size: int) -> int:
    """Return the floats from one product's matrix to the next's: as many as it has, and a cache line.

    So that what is written to all of them alternately does not go to the same set of the cache.
    """
    return size + 16


def panel_place(code: Code, num_rows: int, num_columns: int, row: Value, column: Value) -> Value:
    """Return where a matrix of panels has its element (row, column); the columns are multiples of WIDTH."""
    whole = num_columns - num_columns % PANEL
    start = code.times(code.ir.udiv(column, number(PANEL)), num_rows * PANEL)
    within = code.ir.urem(column, number(PANEL))
    if whole < num_columns:
        is_last = code.ir.icmp_signed(">=", column, number(whole))
        width = code.ir.select(is_last, number(num_columns - whole), number(PANEL))
    else:
        width = number(PANEL)
    return code.plus(start, code.plus(code.times(row, width), within))


def multiply(
    code: Code,
    sizes: tuple[int, int, int],
    left: Value,
    left_strides: tuple[int, int],
    right: Value,
    target: Value,
    *,
    onto: bool,
) -> None:
    """Set target to left · right, or add the product to it; `right` is in panels."""
    num_rows, num_inner, num_columns = sizes
    num_steps = next(steps for steps in (4, 3, 2, 1) if num_inner % steps == 0)
    whole = num_columns - num_columns % PANEL

    def panel(column: Value, width: int) -> None:
        of_panel = code.pointer(right, FLOAT, code.times(column, num_inner))
        for rows, start, stop in _groups(num_rows, _ROWS if width == PANEL else _ROWS_OF_ONE):
            with code.loop(number(start), number(stop), rows) as row:
                block(row, rows, column, width, of_panel)

    def block(row: Value, rows: int, column: Value, width: int, of_panel: Value) -> None:
        corner = code.pointer(target, FLOAT, code.plus(code.times(row, num_columns), column))
        places = [number(i * num_columns + k) for i in range(rows) for k in range(0, width, WIDTH)]
        of_rows = code.pointer(left, FLOAT, code.times(row, left_strides[0]))
        start = [code.spread(FLOAT(0.0), WIDTH)] * len(places)

        def several(turns: Value, sums: list[Value]) -> list[Value]:
            first = code.pointer(of_panel, FLOAT, code.times(turns, num_steps * width))
            factors = code.pointer(of_rows, FLOAT, code.times(turns, num_steps * left_strides[1]))
            for step in range(num_steps):
                sums = turn(first, factors, step, sums)
            return sums

        def turn(first: Value, factors: Value, step: int, sums: list[Value]) -> list[Value]:
            others = [code.vector(first, number(step * width + k), WIDTH) for k in range(0, width, WIDTH)]
            found = []
            for i in range(rows):
                at = number(i * left_strides[0] + step * left_strides[1])
                factor = code.spread(code.load(factors, at), WIDTH)
                found += [code.multiply_add(factor, other, sums[i * len(others) + k]) for k, other in enumerate(others)]
            return found

        for at, total in zip(places, code.fold(number(num_inner // num_steps), start, several), strict=True):
            # Not added to one by one: a sum of sums has smaller errors.
            code.store_vector(code.ir.fadd(code.vector(corner, at, WIDTH), total) if onto else total, corner, at)

    if whole:
        with code.loop(number(0), number(whole), PANEL) as column:
            panel(column, PANEL)
    if whole < num_columns:
        panel(number(whole), num_columns - whole)


def _groups(num_rows: int, most: int) -> list[tuple[int, int, int]]:
    """Divide rows into groups of at most `most`, as even as possible: (rows of a group, first, end)."""
    small, num_larger = divmod(num_rows, -(-num_rows // most))
    first = num_larger * (small + 1)
    return [group for group in ((small + 1, 0, first), (small, first, num_rows)) if group[1] < group[2]]
