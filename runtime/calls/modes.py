"""Training modes of single submodules: set on the parallel module, followed by the copy that programs are traced of."""

from __future__ import annotations

from torch import nn

from runtime.state.weight_tree import WeightTree


def other_modes(model: nn.Module) -> tuple[str, ...]:
    """Paths of submodules that are in training mode where the model is not, or the other way round."""
    mode = model.training
    return tuple(path for path, module in model.named_modules() if module.training != mode)


class SubmoduleModes:
    """Keeps the modes of ``model`` as those of ``parallel``, whose submodules stand at the same paths.

    Args:
        parallel: what users see; ``tree`` is its content, which gets an empty node for each module without parameters.
        model: without data, of the original's classes.
    """

    def __init__(self, parallel: nn.Module, tree: WeightTree, model: nn.Module) -> None:
        self._modules, self._tables = [model], [parallel.__dict__]
        for path, module in model.named_modules(remove_duplicate=False):
            if path:
                self._modules.append(module)
                self._tables.append(tree.node(path).__dict__)
        self._model = model
        self._is_set = False
        self._show()

    def follow(self) -> tuple[str, ...] | None:
        """Take up what was set since the last call; paths of the submodules in the other mode, or None if nothing."""
        now = [table["training"] for table in self._tables]
        if now == self._shown and not self._is_set:
            return None
        before_call = [module.training for module in self._modules] if self._is_set else self._shown
        self._is_set = False
        for module, mode, before in zip(self._modules, now, before_call):
            if mode != before:
                module.training = mode
        self._show()
        return other_modes(self._model)

    def note_set(self) -> None:
        """Note that all modules of the model have been put into another mode, not only those of ``parallel``."""
        self._is_set = True

    def _show(self) -> None:
        """A module at several paths has one mode."""
        self._shown = [module.training for module in self._modules]
        for table, mode in zip(self._tables, self._shown):
            table["training"] = mode
