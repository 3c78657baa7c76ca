"""The functions of `cuda.libdevice`: their names, and the types of their arguments and results, as
Numba has them.

A line of TABLE begins with the types of the result and of the arguments: v none, h int16, i int32,
l int64, f float32, d float64. In capitals: a further result, which C returns through a pointer.
Unsigned integers are declared as signed ones.
"""

from typing import NamedTuple

from . import own_types

TABLE = """
dd acos acosh asin asinh atan atanh cbrt ceil cos cosh cospi drcp_rd drcp_rn drcp_ru drcp_rz
dd dsqrt_rd dsqrt_rn dsqrt_ru dsqrt_rz erf erfc erfcinv erfcx erfinv exp exp10 exp2 expm1 fabs
dd floor j0 j1 lgamma log log10 log1p log2 logb nearbyint normcdf normcdfinv rcbrt rint round rsqrt
dd sin sinh sinpi sqrt tan tanh tgamma trunc y0 y1
ddD modf
ddI frexp
ddd atan2 copysign dadd_rd dadd_rn dadd_ru dadd_rz ddiv_rd ddiv_rn ddiv_ru ddiv_rz dmul_rd dmul_rn
ddd dmul_ru dmul_rz fdim fmax fmin fmod hypot nextafter pow remainder
dddI remquo
dddd fma fma_rd fma_rn fma_ru fma_rz
ddi ldexp powi scalbn
di int2double_rn uint2double_rn
did jn yn
dii hiloint2double
dl ll2double_rd ll2double_rn ll2double_ru ll2double_rz longlong_as_double ull2double_rd
dl ull2double_rn ull2double_ru ull2double_rz
fd double2float_rd double2float_rn double2float_ru double2float_rz
ff acosf acoshf asinf asinhf atanf atanhf cbrtf ceilf cosf coshf cospif erfcf erfcinvf erfcxf erff
ff erfinvf exp10f exp2f expf expm1f fabsf fast_cosf fast_exp10f fast_expf fast_log10f fast_log2f
ff fast_logf fast_sinf fast_tanf floorf frcp_rd frcp_rn frcp_ru frcp_rz frsqrt_rn fsqrt_rd fsqrt_rn
ff fsqrt_ru fsqrt_rz j0f j1f lgammaf log10f log1pf log2f logbf logf nearbyintf normcdff normcdfinvf
ff rcbrtf rintf roundf rsqrtf saturatef sinf sinhf sinpif sqrtf tanf tanhf tgammaf truncf y0f y1f
ffF modff
ffI frexpf
fff atan2f copysignf fadd_rd fadd_rn fadd_ru fadd_rz fast_fdividef fast_powf fdimf fdiv_rd fdiv_rn
fff fdiv_ru fdiv_rz fmaxf fminf fmodf fmul_rd fmul_rn fmul_ru fmul_rz fsub_rd fsub_rn fsub_ru
fff fsub_rz hypotf nextafterf powf remainderf
fffI remquof
ffff fmaf fmaf_rd fmaf_rn fmaf_ru fmaf_rz
ffi ldexpf powif scalbnf
fh half2float
fi int2float_rd int2float_rn int2float_ru int2float_rz int_as_float uint2float_rd uint2float_rn
fi uint2float_ru uint2float_rz
fif jnf ynf
fl ll2float_rd ll2float_rn ll2float_ru ll2float_rz ull2float_rd ull2float_rn ull2float_ru
fl ull2float_rz
hf float2half_rn
id double2hiint double2int_rd double2int_rn double2int_ru double2int_rz double2loint double2uint_rd
id double2uint_rn double2uint_ru double2uint_rz ilogb isfinited isinfd isnand signbitd
if finitef float2int_rd float2int_rn float2int_ru float2int_rz float2uint_rd float2uint_rn
if float2uint_ru float2uint_rz float_as_int ilogbf isinff isnanf signbitf
ii abs brev clz ffs popc
iii hadd max min mul24 mulhi rhadd uhadd umax umin umul24 umulhi urhadd
iiii byte_perm sad usad
il clzll ffsll popcll
ld double2ll_rd double2ll_rn double2ll_ru double2ll_rz double2ull_rd double2ull_rn double2ull_ru
ld double2ull_rz double_as_longlong llrint llround
lf float2ll_rd float2ll_rn float2ll_ru float2ll_rz float2ull_rd float2ull_rn float2ull_ru
lf float2ull_rz llrintf llroundf
ll brevll llabs
lll llmax llmin mul64hi ullmax ullmin umul64hi
vdDD sincos sincospi
vfFF fast_sincosf sincosf sincospif
"""
_TYPES = {
    "v": own_types.void,
    "h": own_types.int16,
    "i": own_types.int32,
    "l": own_types.int64,
    "f": own_types.float32,
    "d": own_types.float64,
}


class Parameter(NamedTuple):
    """A parameter of a function of libdevice."""

    ty: own_types.Type
    is_ptr: bool


def functions() -> dict:
    """Name, with the prefix __nv_ -> (type of the result, parameters)."""
    functions: dict = {}
    for line in TABLE.strip().splitlines():
        kinds, *names = line.split()
        parameters = [Parameter(_TYPES[k.lower()], k.isupper()) for k in kinds[1:]]
        functions |= {f"__nv_{name}": (_TYPES[kinds[0]], parameters) for name in names}
    return functions
