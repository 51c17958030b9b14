"""A window from outside: queries of every second stride see back to the stride before."""

from foldray.windows import Window

STRIDE = 5
STRIDES = Window("strides", lambda query: max(0, query // STRIDE * STRIDE - STRIDE))
