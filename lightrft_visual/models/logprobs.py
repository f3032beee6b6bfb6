"""Log-probabilities and entropy of tokens straight from hidden states, without the (N, V) logits in memory.

A language-model head over N tokens and V vocabulary entries makes N*V logits; their softmax, the entropy and the
backward pass each want another copy. Here rows are taken in chunks: forward keeps two numbers per row (log-sum-exp and
entropy), backward computes each chunk's logits again. Peak memory is then O(chunk * V) in place of O(N * V), at the
price of one more matrix product. The idea is that of fused linear cross-entropy kernels (Liger Kernel, Cut
Cross-Entropy); this form needs only PyTorch and adds the entropy, its gradient, temperature and banned tokens.

The distribution is the one that is sampled from at full support: logits / temperature with banned ids at -inf. A
sampler's top_p below 1 or top_k truncates the support further; that is not applied here, so with truncation on, the
sampler's own log-probs are larger than these by the log of the kept mass.
"""

from __future__ import annotations

from functools import cache

import torch
import torch.nn as nn

T = torch.Tensor

# Logits per chunk. 2**24 in float32 are 64 MiB: 110 rows at a vocabulary of 152k; small vocabularies take one chunk.
# An accelerator has its own memory and needs larger products to be busy; each chunk also makes one product of the size
# of the head in backward, however few rows it has. 2**27 are 512 MiB, 880 rows at 152k.
CHUNK_ELEMENTS, ACCELERATOR_CHUNK_ELEMENTS = 2**24, 2**27


def linear_log_probs(
    hidden: T,
    weight: T,
    targets: T,
    *,
    temperature: float | T = 1.0,
    banned_ids: T | None = None,
    bias: T | None = None,
    soft_cap: float | None = None,
    with_entropy: bool = True,
) -> tuple[T, T | None]:
    """Log-probs of `targets` and entropies under softmax((hidden @ weight.T + bias) / temperature).

    Args:
        hidden: (N, H), any float dtype.
        weight: (V, H), the head's weight; a ZeRO-3 parameter is read as gathered at forward and backward time.
        targets: (N) long, in [0, V).
        temperature: a positive number, or (N) positive numbers (such as another one for each first token).
        banned_ids: (K) long: tokens that cannot be sampled. They leave the softmax, which renormalises over the rest,
            as a sampler's logit bias of -inf does. A banned target has log-prob -inf and no gradient through it; mask
            it with `torch.where`, never by a product.
        bias: (V) or None.
        soft_cap: c where logits x become c tanh(x / c), before the temperature, as in Gemma; None leaves them.
        with_entropy: False skips the entropy.

    Returns:
        log_probs (N) float32 and entropy (N) float32 in nats (None without). Both carry gradients to hidden, weight and
        bias, where those want them. Computed in float32 from any input dtype.

    Raises:
        ValueError: shapes that do not belong together, or a temperature that is not positive.
    """
    if hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(f"hidden {tuple(hidden.shape)} and weight {tuple(weight.shape)} must be (N, H) and (V, H)")
    if targets.shape != hidden.shape[:1]:
        raise ValueError(f"targets {tuple(targets.shape)} must have one id for each of {hidden.shape[0]} rows")
    if isinstance(temperature, T) and temperature.dim() > 0 and temperature.shape != targets.shape:
        raise ValueError(f"temperature {tuple(temperature.shape)} must be a number or have one for each row")
    if not isinstance(temperature, T) and temperature <= 0:
        raise ValueError(f"temperature is {temperature}; log-probs need a positive one")
    chunk = chunk_length(weight.shape[0], hidden.device)
    if not isinstance(temperature, T) or temperature.dim() == 0:
        temperature = torch.full(targets.shape, float(temperature), device=hidden.device)
    scale = temperature.to(hidden.device, torch.float32).reciprocal()
    log_probs, entropy = _LinearLogProbs.apply(
        hidden, weight, bias, targets, scale, banned_ids, soft_cap, chunk, with_entropy
    )
    return log_probs, entropy if with_entropy else None


def chunk_length(vocabulary: int, device: torch.device) -> int:
    """Rows of logits that are made at a time."""
    return max(1, (CHUNK_ELEMENTS if device.type == "cpu" else ACCELERATOR_CHUNK_ELEMENTS) // vocabulary)


class LogProbLinear(nn.Linear):
    """A language-model head that gives log-probs of given targets instead of logits when it is asked to.

    As a module of its own it is where ZeRO-3 gathers the head's weight, before forward and before backward. Without
    `targets` it is `nn.Linear`, parameters, names and all, so a loaded head is turned into one in place by `adopt`.
    soft_cap: what the model does to its logits afterwards, as in `linear_log_probs`; not to those of `nn.Linear`.
    """

    soft_cap: float | None = None

    @classmethod
    def adopt(cls, linear: nn.Linear, soft_cap: float | None = None) -> LogProbLinear:
        """Turn a loaded `nn.Linear` into a LogProbLinear in place: weights, hooks and tied parameters stay.

        Raises TypeError for anything but a plain nn.Linear (an adapter-wrapped or quantised head computes otherwise).
        """
        if type(linear) not in (nn.Linear, cls):
            raise TypeError(f"its language-model head is a {type(linear).__name__}, not an nn.Linear")
        linear.__class__ = cls
        linear.soft_cap = soft_cap
        return linear  # type: ignore[return-value]

    def forward(
        self,
        hidden: T,
        targets: T | None = None,
        temperature: float | T = 1.0,
        banned_ids: T | None = None,
        with_entropy: bool = True,
        in_float32: bool = False,
    ) -> T | tuple[T, T | None]:
        """Logits (..., V); with targets: (log_probs (...), entropy (...) or None), float32.

        Args:
            hidden: (..., H); (N, H) for logits in float32.
            targets: (...) long.
            temperature: a number, or a tensor of the shape of targets.
            banned_ids, with_entropy: as of `linear_log_probs`.
            in_float32: logits without gradient and without rounding to the weight's precision, as log_probs are made
                of; read without targets.
        """
        if targets is None and in_float32:
            unit = torch.ones((), device=hidden.device).expand(hidden.shape[0])
            return _chunk_logits(hidden, _matrix(self.weight), self.bias, unit, None, self.soft_cap)
        if targets is None:
            return super().forward(hidden)
        if isinstance(temperature, T):
            temperature = temperature.reshape(-1)
        log_probs, entropy = linear_log_probs(
            hidden.reshape(-1, hidden.shape[-1]),
            self.weight,
            targets.reshape(-1),
            temperature=temperature,
            banned_ids=banned_ids,
            bias=self.bias,
            soft_cap=self.soft_cap,
            with_entropy=with_entropy,
        )
        return log_probs.view(targets.shape), None if entropy is None else entropy.view(targets.shape)


@cache
def _has_mixed_product(device_type: str, dtype: torch.dtype) -> bool:
    """Whether this kind of device multiplies matrices of `dtype` into a float32 result; tried once on a small one."""
    probe = torch.ones(16, 16, dtype=dtype, device=device_type)
    try:
        torch.mm(probe, probe, out_dtype=torch.float32)
    except (NotImplementedError, RuntimeError):
        return False
    return True


def _keeps_float32(tensor: T) -> bool:
    """Whether products with this half-precision tensor can skip its float32 copy."""
    return tensor.dtype in (torch.bfloat16, torch.float16) and _has_mixed_product(tensor.device.type, tensor.dtype)


def _product(left: T, right: T) -> T:
    """left @ right in float32. `right` is an input of the caller (half precision, or widened), `left` of any dtype.

    Products of half-precision numbers are exact in float32, so the fast path loses nothing in forward; in backward it
    rounds the logits' gradient to the input dtype, as autograd does for a half-precision head.
    """
    if _keeps_float32(right):
        return torch.mm(left.to(right.dtype), right, out_dtype=torch.float32)
    return torch.mm(left.float(), right.float())


class _LinearLogProbs(torch.autograd.Function):
    """(log_probs, entropy), each (N) float32, of a linear head, logits recomputed by chunks of rows in backward. The
    entropy is zeros where it is not asked for."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, targets, scale, banned_ids, soft_cap, chunk, with_entropy):
        ctx.set_materialize_grads(False)
        ctx.chunk, ctx.soft_cap = chunk, soft_cap
        log_probs = torch.empty(hidden.shape[0], dtype=torch.float32, device=hidden.device)
        log_norm, entropy = torch.empty_like(log_probs), torch.zeros_like(log_probs)
        with torch.autocast(hidden.device.type, enabled=False):
            matrix = _matrix(weight)
            for start in range(0, hidden.shape[0], chunk):
                part = slice(start, start + chunk)
                logits = _chunk_logits(hidden[part], matrix, bias, scale[part], banned_ids, soft_cap)
                largest = logits.amax(dim=1, keepdim=True)
                weights = logits.sub_(largest).exp()
                total = weights.sum(dim=1)
                log_total = total.log()
                log_norm[part] = largest.squeeze(1) + log_total
                log_probs[part] = logits.gather(1, targets[part].unsqueeze(1)).squeeze(1) - log_total
                if with_entropy:
                    # log(sum) minus a weighted mean: unlike -sum p log p, no rounding error times the entropy.
                    if banned_ids is not None:
                        logits.index_fill_(1, banned_ids, 0.0)
                    entropy[part] = log_total - weights.mul_(logits).sum(dim=1) / total
        # The parameter itself is saved, not its data: ZeRO-3 frees and gathers that between forward and backward.
        ctx.save_for_backward(hidden, weight, bias, targets, scale, banned_ids, log_norm, entropy)
        if not with_entropy:
            ctx.mark_non_differentiable(entropy)
        return log_probs, entropy

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_log_probs, grad_entropy):
        hidden, weight, bias, targets, scale, banned_ids, log_norm, entropy = ctx.saved_tensors
        if grad_log_probs is None:
            grad_log_probs = torch.zeros_like(log_norm)
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.empty_like(hidden) if wants_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if wants_weight else None
        grad_bias = torch.zeros_like(bias, dtype=torch.float32) if bias is not None and wants_bias else None
        matrix = _matrix(weight)
        with torch.autocast(hidden.device.type, enabled=False):
            for start in range(0, hidden.shape[0], ctx.chunk):
                part = slice(start, start + ctx.chunk)
                logits = _chunk_logits(hidden[part], matrix, bias, scale[part], banned_ids, ctx.soft_cap)
                slope = None if ctx.soft_cap is None else _soft_cap_slope(logits, scale[part], ctx.soft_cap)
                grad = _logit_gradient(
                    logits.sub_(log_norm[part].unsqueeze(1)),
                    targets[part],
                    grad_log_probs[part],
                    None if grad_entropy is None else grad_entropy[part],
                    entropy[part],
                    banned_ids,
                )
                grad = grad.mul_(scale[part].unsqueeze(1) if slope is None else slope)  # (n, V), of the chunk's logits
                if grad_hidden is not None:
                    grad_hidden[part] = _product(grad, matrix).to(hidden.dtype)
                if grad_weight is not None and _keeps_float32(hidden):
                    grad_weight += torch.mm(grad.t().to(hidden.dtype), hidden[part], out_dtype=torch.float32)
                elif grad_weight is not None:
                    grad_weight.addmm_(grad.t(), hidden[part].float())
                if grad_bias is not None:
                    grad_bias += grad.sum(dim=0)
        made = ((grad_hidden, hidden), (grad_weight, weight), (grad_bias, bias))
        grads = (None if each is None else each.to(like.dtype) for each, like in made)
        return *grads, None, None, None, None, None, None


def _matrix(weight: T) -> T:
    """The weight as the products want it: as it is where the device multiplies it into float32, else in float32."""
    return weight.detach() if _keeps_float32(weight) else weight.detach().float()


def _chunk_logits(hidden: T, matrix: T, bias: T | None, scale: T, banned_ids: T | None, soft_cap: float | None) -> T:
    """Scaled logits (n, V) float32 of one chunk, banned columns at -inf. The caller may overwrite them."""
    logits = _product(hidden.detach(), matrix.t())
    if bias is not None:
        logits += bias.detach()
    if soft_cap is not None:
        logits = logits.div_(soft_cap).tanh_().mul_(soft_cap)
    logits *= scale.unsqueeze(1)
    if banned_ids is not None:
        logits.index_fill_(1, banned_ids, float("-inf"))
    return logits


def _soft_cap_slope(logits: T, scale: T, soft_cap: float) -> T:
    """d (scaled, capped logits) / d (logits of the head), (n, V); 0 at banned ones."""
    capped = (logits / (soft_cap * scale.unsqueeze(1))).clamp_(-1, 1)
    return capped.square_().neg_().add_(1).mul_(scale.unsqueeze(1))


def _logit_gradient(
    log_softmax: T, targets: T, grad_log_probs: T, grad_entropy: T | None, entropy: T, banned_ids: T | None
) -> T:
    """d loss / d (scaled logits), (n, V); overwrites log_softmax.

    d log p_target / d z = onehot - p, and d entropy / d z = -p * (log p + entropy).
    """
    probs = log_softmax.exp()
    if grad_entropy is None:
        grad = probs.mul_(grad_log_probs.neg().unsqueeze(1))
    else:
        log_softmax.add_(entropy.unsqueeze(1)).mul_(grad_entropy.unsqueeze(1)).add_(grad_log_probs.unsqueeze(1))
        grad = probs.mul_(log_softmax).neg_()
    grad.scatter_add_(1, targets.unsqueeze(1), grad_log_probs.unsqueeze(1))
    # Banned columns may hold NaN here; a banned target's own must stay without gradient too.
    return grad if banned_ids is None else grad.index_fill_(1, banned_ids, 0.0)
