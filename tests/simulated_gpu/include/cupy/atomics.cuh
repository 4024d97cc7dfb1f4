#pragma once /* in place of CuPy's header: none of our kernels needs what it defines */
