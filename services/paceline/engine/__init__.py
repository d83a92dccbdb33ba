"""The only code that imports torch."""

import logging

# transformers imports torchao wherever it is installed, used or not; what torchao then says, about
# kernels for other machines and about torch's own plans, helps nobody who serves a model.
for _name in ("torchao", "torch.utils._pytree"):
    logging.getLogger(_name).setLevel(logging.ERROR)
