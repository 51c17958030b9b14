"""A window of the user's own: the queries of a stride see their stride and the one before it."""

from foldray.windows import Window

STRIDE = 5
STRIDES = Window("strides", lambda query: max(0, query // STRIDE * STRIDE - STRIDE))
