"""Rebuilds a traced network for a group, node by node: the heart of `gcnn.convert`.

Every value of the new network is known as an image, a map on the group, a function on the point group, or something else
(`Value`), and with it how many channels it had and has. What is not known to keep the symmetry is refused, with the way out.
Layers are in `layers`, functions and methods in `calls`, each with a table at its end; what they share is the `Converter`. How a
forward becomes a graph is in `trace`.
"""

from gcnn.rebuild.converter import Converter
from gcnn.rebuild.values import Value

__all__ = ["Converter", "Value"]
