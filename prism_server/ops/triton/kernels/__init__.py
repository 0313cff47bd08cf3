"""The kernels themselves: device code only. The modules beside this package launch them."""
