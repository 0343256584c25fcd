from collections.abc import Callable, Sequence

PassCost = Callable[[Sequence[int]], float]
