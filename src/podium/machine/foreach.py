"""torch's operators on lists of tensors: one call, and on a GPU few kernels, for all tensors of a model.

They are private names of torch, so nothing but this module knows them. A loop over the tensors with the public
operators would replace them: the same bits, and slower by the cost of a call for each tensor.
"""

import torch

add = torch._foreach_add
add_ = torch._foreach_add_
addcdiv_ = torch._foreach_addcdiv_
addcmul_ = torch._foreach_addcmul_
copy_ = torch._foreach_copy_
div_ = torch._foreach_div_
mul = torch._foreach_mul
mul_ = torch._foreach_mul_
norm = torch._foreach_norm
sqrt = torch._foreach_sqrt
sqrt_ = torch._foreach_sqrt_
sub_ = torch._foreach_sub_
