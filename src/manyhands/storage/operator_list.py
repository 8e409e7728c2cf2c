"""The closed list of tensor operators that a stored program may call, by kind.

The list consists of the operators in exports of many networks, and of the other overloads of the same functions. It was
reviewed for bounds checks: every kernel in it checks sizes, strides and indices against the memory that it is given, or
is called through a validator in `operators`. Not in the list are overloads that write into a given output, operators of
gradients and of sparse, quantized and MKL-DNN tensors, and operators that create a view without checking its storage or
that change a tensor's storage.
"""

from __future__ import annotations


def _set(text: str) -> frozenset[str]:
    return frozenset(f"aten.{name}" for name in text.split())


POINTWISE = _set(
    """
    abs.default abs_.default absolute.default absolute_.default acos.default acos_.default arccos.default
    arccos_.default acosh.default acosh_.default arccosh.default arccosh_.default asin.default asin_.default
    arcsin.default arcsin_.default asinh.default asinh_.default arcsinh.default arcsinh_.default atan.default
    atan_.default arctan.default arctan_.default atanh.default atanh_.default arctanh.default arctanh_.default
    ceil.default ceil_.default cos.default cos_.default cosh.default cosh_.default deg2rad.default deg2rad_.default
    digamma.default digamma_.default erf.default erf_.default erfc.default erfc_.default erfinv.default
    erfinv_.default exp.default exp_.default exp2.default exp2_.default expm1.default expm1_.default floor.default
    floor_.default frac.default frac_.default i0.default i0_.default lgamma.default lgamma_.default log.default
    log_.default log10.default log10_.default log1p.default log1p_.default log2.default log2_.default logit.default
    logit_.default mvlgamma.default neg.default neg_.default negative.default negative_.default nan_to_num.default
    nan_to_num_.default rad2deg.default rad2deg_.default reciprocal.default reciprocal_.default relu.default
    relu_.default relu6.default relu6_.default round.decimals round.default round_.decimals round_.default
    rsqrt.default rsqrt_.default selu.default selu_.default sgn.default sgn_.default sigmoid.default
    sigmoid_.default sign.default sign_.default silu.default silu_.default sin.default sin_.default sinc.default
    sinc_.default sinh.default sinh_.default sqrt.default sqrt_.default square.default square_.default tan.default
    tan_.default tanh.default tanh_.default trunc.default trunc_.default fix.default fix_.default mish.default
    mish_.default celu.default celu_.default elu.default elu_.default hardsigmoid.default hardsigmoid_.default
    hardswish.default hardswish_.default hardtanh.default hardtanh_.default leaky_relu.default leaky_relu_.default
    threshold.default threshold_.default positive.default signbit.default angle.default real.default imag.default
    conj.default conj_physical.default resolve_conj.default resolve_neg.default _conj.default _neg_view.default
    glu.default gelu.default gelu_.default prelu.default rrelu.default softplus.default softshrink.default
    hardshrink.default log_sigmoid.default polygamma.default special_entr.default special_erf.default
    special_erfc.default special_erfcx.default special_erfinv.default special_exp2.default special_expit.default
    special_expm1.default special_gammaln.default special_digamma.default special_psi.default special_i0.default
    special_i0e.default special_i1.default special_i1e.default special_log1p.default special_log_ndtr.default
    special_logit.default special_ndtr.default special_ndtri.default special_round.default special_sinc.default
    special_xlog1py.default special_xlog1py.other_scalar special_xlog1py.self_scalar special_xlogy.default
    special_xlogy.other_scalar special_xlogy.self_scalar special_zeta.default special_zeta.other_scalar
    special_zeta.self_scalar add.Scalar add.Tensor add_.Scalar add_.Tensor sub.Scalar sub.Tensor sub_.Scalar
    sub_.Tensor subtract.Scalar subtract.Tensor subtract_.Scalar subtract_.Tensor mul.Scalar mul.Tensor mul_.Scalar
    mul_.Tensor multiply.Scalar multiply.Tensor multiply_.Scalar multiply_.Tensor div.Scalar div.Scalar_mode
    div.Tensor div.Tensor_mode div_.Scalar div_.Scalar_mode div_.Tensor div_.Tensor_mode divide.Scalar
    divide.Scalar_mode divide.Tensor divide.Tensor_mode divide_.Scalar divide_.Scalar_mode divide_.Tensor
    divide_.Tensor_mode true_divide.Scalar true_divide.Tensor true_divide_.Scalar true_divide_.Tensor
    floor_divide.Scalar floor_divide.default floor_divide_.Scalar floor_divide_.Tensor fmod.Scalar fmod.Tensor
    fmod_.Scalar fmod_.Tensor remainder.Scalar remainder.Scalar_Tensor remainder.Tensor remainder_.Scalar
    remainder_.Tensor pow.Scalar pow.Tensor_Scalar pow.Tensor_Tensor pow_.Scalar pow_.Tensor float_power.Scalar
    float_power.Tensor_Scalar float_power.Tensor_Tensor atan2.default atan2_.default arctan2.default
    arctan2_.default hypot.default hypot_.default maximum.default minimum.default fmax.default fmin.default
    copysign.Scalar copysign.Tensor copysign_.Scalar copysign_.Tensor heaviside.default heaviside_.default
    ldexp.Tensor logaddexp.default logaddexp2.default xlogy.Scalar_Other xlogy.Scalar_Self xlogy.Tensor
    xlogy_.Scalar_Other xlogy_.Tensor lerp.Scalar lerp.Tensor lerp_.Scalar lerp_.Tensor addcmul.default
    addcmul_.default addcdiv.default addcdiv_.default rsub.Scalar rsub.Tensor gcd.default gcd_.default lcm.default
    lcm_.default nextafter.default bitwise_and.Scalar bitwise_and.Scalar_Tensor bitwise_and.Tensor
    bitwise_and_.Scalar bitwise_and_.Tensor bitwise_or.Scalar bitwise_or.Scalar_Tensor bitwise_or.Tensor
    bitwise_or_.Scalar bitwise_or_.Tensor bitwise_xor.Scalar bitwise_xor.Scalar_Tensor bitwise_xor.Tensor
    bitwise_xor_.Scalar bitwise_xor_.Tensor bitwise_not.default bitwise_not_.default
    bitwise_left_shift.Scalar_Tensor bitwise_left_shift.Tensor bitwise_left_shift.Tensor_Scalar
    bitwise_left_shift_.Tensor bitwise_left_shift_.Tensor_Scalar bitwise_right_shift.Scalar_Tensor
    bitwise_right_shift.Tensor bitwise_right_shift.Tensor_Scalar bitwise_right_shift_.Tensor
    bitwise_right_shift_.Tensor_Scalar __and__.Scalar __and__.Tensor __or__.Scalar __or__.Tensor __xor__.Scalar
    __xor__.Tensor __lshift__.Scalar __lshift__.Tensor __rshift__.Scalar __rshift__.Tensor __iand__.Scalar
    __iand__.Tensor __ior__.Scalar __ior__.Tensor __ixor__.Scalar __ixor__.Tensor logical_and.default
    logical_and_.default logical_or.default logical_or_.default logical_xor.default logical_xor_.default
    logical_not.default logical_not_.default eq.Scalar eq.Tensor eq_.Scalar eq_.Tensor ne.Scalar ne.Tensor
    ne_.Scalar ne_.Tensor lt.Scalar lt.Tensor lt_.Scalar lt_.Tensor le.Scalar le.Tensor le_.Scalar le_.Tensor
    gt.Scalar gt.Tensor gt_.Scalar gt_.Tensor ge.Scalar ge.Tensor ge_.Scalar ge_.Tensor not_equal.Scalar
    not_equal.Tensor not_equal_.Scalar not_equal_.Tensor less.Scalar less.Tensor less_.Scalar less_.Tensor
    less_equal.Scalar less_equal.Tensor less_equal_.Scalar less_equal_.Tensor greater.Scalar greater.Tensor
    greater_.Scalar greater_.Tensor greater_equal.Scalar greater_equal.Tensor greater_equal_.Scalar
    greater_equal_.Tensor isclose.default isfinite.default isinf.default isnan.default isneginf.default
    isposinf.default isreal.default isin.Scalar_Tensor isin.Tensor_Scalar isin.Tensor_Tensor where.Scalar
    where.ScalarOther where.ScalarSelf where.default where.self clamp.Tensor clamp.default clamp_.Tensor
    clamp_.default clamp_min.Tensor clamp_min.default clamp_min_.Tensor clamp_min_.default clamp_max.Tensor
    clamp_max.default clamp_max_.Tensor clamp_max_.default clip.Tensor clip.default clip_.Tensor clip_.default
    complex.default polar.default view_as_real.default view_as_complex.default
    """
)
REDUCTIONS = _set(
    """
    sum.default sum.dim_IntList mean.default mean.dim prod.default prod.dim_int amax.default amin.default
    max.default max.dim max.other min.default min.dim min.other argmax.default argmin.default all.default all.dim
    all.dims any.default any.dim any.dims var.correction var.default var.dim std.correction std.default std.dim
    var_mean.correction var_mean.default var_mean.dim std_mean.correction std_mean.default std_mean.dim norm.Scalar
    norm.ScalarOpt_dim norm.ScalarOpt_dim_dtype norm.ScalarOpt_dtype logsumexp.default special_logsumexp.default
    nansum.default nanmean.default median.default median.dim nanmedian.default nanmedian.dim mode.default
    kthvalue.default quantile.default quantile.scalar nanquantile.default nanquantile.scalar count_nonzero.default
    count_nonzero.dim_IntList aminmax.default cumsum.default cumsum_.default cumprod.default cumprod_.default
    cummax.default cummin.default logcumsumexp.default diff.default trapezoid.dx trapezoid.x trapz.dx trapz.x
    cumulative_trapezoid.dx cumulative_trapezoid.x renorm.default softmax.int log_softmax.int
    special_softmax.default special_log_softmax.default _softmax.default _log_softmax.default dist.default
    equal.default histc.default bincount.default
    """
)
SHAPES = _set(
    """
    view.default view.dtype reshape.default _unsafe_view.default view_as.default reshape_as.default
    flatten.using_ints unflatten.int squeeze.default squeeze.dim squeeze.dims unsqueeze.default expand.default
    expand_as.default broadcast_to.default broadcast_tensors.default permute.default transpose.int t.default
    mT.default mH.default adjoint.default numpy_T.default matrix_H.default swapaxes.default swapdims.default
    movedim.int movedim.intlist moveaxis.int moveaxis.intlist narrow.Tensor narrow.default select.int slice.Tensor
    split.Tensor split.sizes split_with_sizes.default unsafe_split.Tensor unsafe_split_with_sizes.default
    chunk.default unsafe_chunk.default tensor_split.indices tensor_split.sections
    tensor_split.tensor_indices_or_sections hsplit.array hsplit.int vsplit.array vsplit.int dsplit.array dsplit.int
    unbind.int unfold.default diagonal.default diag.default diag_embed.default diagflat.default tile.default
    repeat.default repeat_interleave.Tensor repeat_interleave.self_Tensor repeat_interleave.self_int flip.default
    fliplr.default flipud.default roll.default rot90.default ravel.default contiguous.default clone.default
    alias.default detach.default detach_.default lift_fresh_copy.default lift_fresh.default cat.default
    concat.default concatenate.default stack.default hstack.default vstack.default row_stack.default dstack.default
    column_stack.default meshgrid.default meshgrid.indexing atleast_1d.Sequence atleast_1d.default
    atleast_2d.Sequence atleast_2d.default atleast_3d.Sequence atleast_3d.default block_diag.default
    cartesian_prod.default combinations.default tril.default tril_.default triu.default triu_.default
    tril_indices.default triu_indices.default pad.default constant_pad_nd.default as_strided.default to.device
    to.dtype to.dtype_layout to.other _to_copy.default type_as.default copy.default copy_.default fill.Scalar
    fill.Tensor fill_.Scalar fill_.Tensor zero.default zero_.default sym_size.int sym_stride.int sym_numel.default
    item.default _local_scalar_dense.default pixel_shuffle.default pixel_unshuffle.default channel_shuffle.default
    native_channel_shuffle.default trace.default select_scatter.default slice_scatter.default
    diagonal_scatter.default
    """
)
FACTORIES = _set(
    """
    zeros.default ones.default full.default arange.default arange.start arange.start_step linspace.Scalar_Tensor
    linspace.Tensor_Scalar linspace.Tensor_Tensor linspace.default logspace.Scalar_Tensor logspace.Tensor_Scalar
    logspace.Tensor_Tensor logspace.default eye.default eye.m scalar_tensor.default zeros_like.default
    ones_like.default full_like.default new_zeros.default new_ones.default new_full.default rand.default
    rand_like.default randn.default randn_like.default randint.default randint.low randint_like.Tensor
    randint_like.default randint_like.low_dtype randperm.default normal.Tensor_Tensor normal.Tensor_float
    normal.float_Tensor normal.float_float normal_.default bernoulli.Tensor bernoulli.default bernoulli.p
    bernoulli_.Tensor bernoulli_.float multinomial.default poisson.default uniform_.default exponential_.default
    random_.default random_.from random_.to geometric_.default log_normal_.default cauchy_.default
    hann_window.default hann_window.periodic hamming_window.default hamming_window.periodic
    hamming_window.periodic_alpha hamming_window.periodic_alpha_beta blackman_window.default
    blackman_window.periodic bartlett_window.default bartlett_window.periodic kaiser_window.beta
    kaiser_window.default kaiser_window.periodic vander.default
    """
)
INDEXING = _set(
    """
    index.Tensor index_put.default index_put_.default index_select.default index_add.default index_add_.default
    index_copy.default index_copy_.default index_fill.int_Scalar index_fill.int_Tensor index_fill_.int_Scalar
    index_fill_.int_Tensor index_reduce.default index_reduce_.default gather.default scatter.reduce scatter.src
    scatter.value scatter.value_reduce scatter_.reduce scatter_.src scatter_.value scatter_.value_reduce
    scatter_add.default scatter_add_.default scatter_reduce.two scatter_reduce_.two masked_fill.Scalar
    masked_fill.Tensor masked_fill_.Scalar masked_fill_.Tensor masked_scatter.default masked_scatter_.default
    masked_select.default nonzero.default argwhere.default take.default take_along_dim.default put.default
    put_.default embedding.default sort.default sort.stable argsort.default argsort.stable topk.default
    msort.default searchsorted.Scalar searchsorted.Tensor bucketize.Scalar bucketize.Tensor one_hot.default
    """
)
LAYERS = _set(
    """
    linear.default bilinear.default conv1d.default conv1d.padding conv2d.default conv2d.padding conv3d.default
    conv3d.padding convolution.default conv_transpose1d.default conv_transpose2d.input conv_transpose3d.input
    _convolution.default _convolution.deprecated batch_norm.default instance_norm.default group_norm.default
    layer_norm.default rms_norm.default native_layer_norm.default native_group_norm.default dropout.default
    dropout_.default feature_dropout.default feature_dropout_.default alpha_dropout.default alpha_dropout_.default
    feature_alpha_dropout.default feature_alpha_dropout_.default native_dropout.default max_pool1d.default
    max_pool2d.default max_pool3d.default max_pool1d_with_indices.default max_pool2d_with_indices.default
    max_pool3d_with_indices.default avg_pool1d.default avg_pool2d.default avg_pool3d.default
    adaptive_avg_pool1d.default adaptive_avg_pool2d.default adaptive_avg_pool3d.default adaptive_max_pool1d.default
    adaptive_max_pool2d.default adaptive_max_pool3d.default max_unpool2d.default max_unpool3d.default
    upsample_nearest1d.default upsample_nearest1d.vec upsample_nearest2d.default upsample_nearest2d.vec
    upsample_nearest3d.default upsample_nearest3d.vec upsample_linear1d.default upsample_linear1d.vec
    upsample_bilinear2d.default upsample_bilinear2d.vec upsample_bicubic2d.default upsample_bicubic2d.vec
    upsample_trilinear3d.default upsample_trilinear3d.vec _upsample_nearest_exact1d.default
    _upsample_nearest_exact1d.vec _upsample_nearest_exact2d.default _upsample_nearest_exact2d.vec
    _upsample_nearest_exact3d.default _upsample_nearest_exact3d.vec _upsample_bilinear2d_aa.default
    _upsample_bilinear2d_aa.vec _upsample_bicubic2d_aa.default _upsample_bicubic2d_aa.vec grid_sampler.default
    grid_sampler_2d.default grid_sampler_3d.default affine_grid_generator.default im2col.default col2im.default
    reflection_pad1d.default reflection_pad2d.default reflection_pad3d.default replication_pad1d.default
    replication_pad2d.default replication_pad3d.default scaled_dot_product_attention.default lstm.input gru.input
    rnn_tanh.input rnn_relu.input lstm_cell.default gru_cell.default rnn_tanh_cell.default rnn_relu_cell.default
    cosine_similarity.default pairwise_distance.default cdist.default pdist.default mse_loss.default l1_loss.default
    smooth_l1_loss.default huber_loss.default binary_cross_entropy.default binary_cross_entropy_with_logits.default
    kl_div.default cross_entropy_loss.default nll_loss.default nll_loss2d.default nll_loss_nd.default
    poisson_nll_loss.default cosine_embedding_loss.default margin_ranking_loss.default soft_margin_loss.default
    hinge_embedding_loss.default triplet_margin_loss.default
    """
)
ALGEBRA = _set(
    """
    mm.default mm.dtype bmm.default bmm.dtype matmul.default addmm.default addmm.dtype addmm_.default addbmm.default
    addbmm_.default baddbmm.default baddbmm.dtype baddbmm_.default addmv.default addmv_.default addr.default
    addr_.default mv.default dot.default vdot.default inner.default outer.default ger.default kron.default
    einsum.default tensordot.default chain_matmul.default linalg_multi_dot.default linalg_cross.default
    cross.default linalg_inv.default inverse.default linalg_inv_ex.default linalg_det.default det.default
    linalg_slogdet.default slogdet.default logdet.default linalg_solve.default linalg_solve_ex.default
    linalg_cholesky.default cholesky.default linalg_cholesky_ex.default cholesky_solve.default
    cholesky_inverse.default linalg_eigh.default linalg_eigvalsh.default linalg_svd.default linalg_svdvals.default
    svd.default linalg_qr.default qr.default linalg_pinv.atol_rtol_float linalg_pinv.atol_rtol_tensor
    linalg_pinv.default linalg_pinv.rcond_tensor linalg_matrix_rank.atol_rtol_float
    linalg_matrix_rank.atol_rtol_tensor linalg_matrix_rank.default linalg_matrix_rank.tol_tensor
    linalg_matrix_power.default matrix_power.default linalg_matrix_exp.default matrix_exp.default
    linalg_lstsq.default linalg_lu_factor.default linalg_lu.default linalg_solve_triangular.default
    triangular_solve.default linalg_householder_product.default linalg_vecdot.default linalg_diagonal.default
    linalg_norm.default linalg_norm.ord_str linalg_vector_norm.default linalg_matrix_norm.default
    linalg_matrix_norm.str_ord linalg_matmul.default linalg_cond.default linalg_cond.p_str linalg_vander.default
    linalg_tensorinv.default linalg_tensorsolve.default fft_fft.default fft_ifft.default fft_rfft.default
    fft_irfft.default fft_hfft.default fft_ihfft.default fft_fft2.default fft_ifft2.default fft_rfft2.default
    fft_irfft2.default fft_fftn.default fft_ifftn.default fft_rfftn.default fft_irfftn.default fft_hfft2.default
    fft_ihfft2.default fft_hfftn.default fft_ihfftn.default fft_fftshift.default fft_ifftshift.default
    fft_fftfreq.default fft_rfftfreq.default stft.center stft.default istft.default
    """
)
CHECKS = _set(
    """
    _assert_scalar.default _assert_async.default _assert_async.msg _assert_tensor_metadata.default
    sym_constrain_range.default sym_constrain_range_for_size.default
    """
)

ALLOWED: frozenset[str] = POINTWISE | REDUCTIONS | SHAPES | FACTORIES | INDEXING | LAYERS | ALGEBRA | CHECKS
