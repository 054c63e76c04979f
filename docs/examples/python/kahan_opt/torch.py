"""Optimizers for PyTorch that train weights in pure bf16 or fp16: see help(KahanAdamW) and docs/pytorch.md."""
import collections
import functools
import itertools
import operator
import warnings
import weakref
import zlib
from typing import Any, Callable, Dict, Iterable, List, Optional, Tuple, Union

import torch
from torch import Tensor

from . import header as k, peers
from .calls import CALLS, Bucket, Entry, GpuCall, add_norms, increment_version, on_gpu, refuse_capture, taken
from .options import (ASKED_FOR, FORMATS, NOT_IN_TORCH, RULES, TORCH, WAYS, defaults_of, described_options, layout_of,
                      moments_of, translated, validate)
from .state import Host, begun, fitted, local, order

Params = Iterable[Union[Tensor, Dict[str, Any], Tuple[str, Tensor]]]
Rate = Union[float, Tensor]
_untraced = getattr(getattr(torch, "compiler", None), "disable", lambda function: function)  # by torch.compile
_number_of = functools.lru_cache(None)(lambda name: zlib.crc32(name.encode()))  # the id of a parameter with a name
grad_of = operator.attrgetter("grad")
Formats = Union[None, str, Tuple[Optional[str], Optional[str]]]


class Uncast:
    """Hides a state from load_state_dict(), which would convert its tensors to the parameter's dtype, or copy them."""

    def __init__(self, state):
        self.state = state

    def __deepcopy__(self, memo):
        return self


class KahanOptimizer(torch.optim.Optimizer):
    """Any of the rules: sgd, adam, adamw, stable_adamw, lion, adan, radam, ranger, adam_atan2.

    Parameters and gradients are float32, bfloat16 or float16, on the CPU or (./build.sh python cuda) on a GPU. They are
    stepped where they are, in one call for all tensors of a group. Each group may have its own options, and a program
    may edit them as with torch.optim. options_of(rule) lists the options of a rule.

    The state of a parameter is what torch.optim has, exp_avg and so on, and `residual`: tensors of its shape, which a
    program may read, move, replace, cut and join.

    The random bits of a parameter are a function of its group's seed, its id and its step: see noise_key(). Its id is
    its place in the groups or, if named_parameters() were passed, the CRC-32 of its name. Two optimizers with the same
    seed draw equal noise: where there are several, as with one per parameter, give each a seed of its own."""
    _accumulates = False

    def __init__(self, params: Params, rule: str = "adamw", **options: Any) -> None:
        self._forget()
        super().__init__(params, defaults_of(rule, options))

    @staticmethod
    def options_of(rule: str) -> str:
        """The options of a rule: what they mean, values, units, defaults, and what torch.optim has instead."""
        return described_options(rule)

    def _forget(self):
        """Looks at all tensors anew. _entries: by the id() of a parameter. _buckets: of each group, by kind, until an
        entry is new or lost, with the places of states that have this _order. _plans: the calls of the last steps, and
        their _options. _listed: the parameters of the groups, by id(), and names. _reports: those of GPUs that
        have not been read."""
        self._entries, self._plans, self._options = {}, {}, {}
        self._listed = self._buckets = self._order = None
        self._reports = collections.deque()

    def add_param_group(self, param_group: Dict[str, Any]) -> None:
        """Adds a group with options of its own: {"params": ..., "lr": ...}."""
        super().add_param_group(translated(param_group))
        group = self.param_groups[-1]
        try:
            if group["rule"] != self.defaults["rule"]:
                raise ValueError("all groups have one rule")
            validate(group, len(self.param_groups) - 1)
        except Exception:
            self.param_groups.pop()
            raise

    @property
    def _step_supports_amp_scaling(self):
        """Does GradScaler leave its scale to step()? It refuses to unscale fp16; in all else it is as with torch.optim.
        (The protocol of PyTorch 2.3.)"""
        return hasattr(getattr(torch, "amp", None), "GradScaler") and any(
            p.dtype == torch.float16 for group in self.param_groups for p in group["params"])

    def _validate(self):
        for number, group in enumerate(self.param_groups):
            validate(group, number)

    def _name(self, p):
        """Words for an error."""
        place = 0
        for number, group in enumerate(self.param_groups):
            for within, q in enumerate(group["params"]):
                if q is p:
                    return "parameter %d (group %d, place %d, shape %s, %s)" % (
                        place, number, within, tuple(p.shape), p.dtype)
                place += 1
        return "a parameter that is in no group"

    @staticmethod
    def _members(groups):
        """(id, group, parameter). One that is listed twice, which torch.optim warns of, counts once."""
        seen, numbers, members = set(), set(), []
        for group in groups:
            params, names = group["params"], group.get("param_names")
            for i, p in enumerate(params):
                if id(p) not in seen:
                    number = len(seen)
                    seen.add(id(p))
                    if names:
                        number = _number_of(names[i])
                        while number in numbers:  # two names that are equal, or have one CRC
                            number = (number + 1) % 2 ** 32
                        numbers.add(number)
                    members.append((number, group, p))
        return members

    def _member(self, p):
        """(id, group, p) of one parameter."""
        for member in self._members(self.param_groups):
            if member[2] is p:
                return member
        raise ValueError("the tensor of shape %s is no parameter of this optimizer" % (tuple(p.shape),))

    # ---- step ----

    @property
    def optimizer_accumulation(self) -> bool:
        """True: a step takes its gradients into the moments, and leaves the weights as they are: of several batches
        the last is stepped with False. With gradient release, which keeps no gradients that could be summed."""
        return self._accumulates

    @optimizer_accumulation.setter
    def optimizer_accumulation(self, value: bool) -> None:
        self._accumulates = bool(value)

    @torch.no_grad()
    def step(self, closure: Optional[Callable[[], Any]] = None, param: Optional[Tensor] = None) -> Any:
        """One step of each parameter that has a gradient. If anything is refused, nothing is written. closure: is
        called first, with gradients enabled, and its value is returned. param: steps this parameter only."""
        if closure is not None and param is not None:
            raise ValueError("step() takes a closure or a param, not both")
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._step(param)
        return loss

    @_untraced
    def _step(self, param):
        refuse_capture()
        self._read_reports()
        scale, found_inf, max_norm = (  # of a GradScaler or KahanScaler
            getattr(self, name, None) for name in ("grad_scale", "found_inf", "max_norm"))
        if found_inf is not None and not on_gpu(found_inf) and float(found_inf):
            return
        calls = self._calls(param, scale, getattr(self, "clip", 1.0), self._accumulates)
        there = [call for call in calls if isinstance(call, GpuCall)]
        if found_inf is not None and len(there) < len(calls) and float(found_inf):
            return
        for call in there:
            call.prepare(found_inf, max_norm)
        if there and max_norm is not None:
            self.overflow = add_norms(there)
        for call in calls:
            call.run()
            if param is not None:
                call.tell()

    def _read_reports(self, wait=False):
        """Reads what GPUs have said of earlier steps: what was skipped does not count, what was refused is raised."""
        wrong = k.KOPT_OK
        while self._reports and (wait or wrong or self._reports[0].event.query()):
            result = self._reports.popleft().read(self.state)
            wrong = wrong or result
        k.check(wrong, "the GPU has refused an earlier step")

    def zero_grad(self, set_to_none: bool = True, param: Optional[Tensor] = None) -> None:
        """Frees the gradients, or sets them to zero: of all parameters, or of one."""
        if param is None:
            super().zero_grad(set_to_none=set_to_none)
        elif set_to_none:
            param.grad = None
        elif param.grad is not None:
            param.grad.detach_().zero_()

    def _calls(self, only=None, *scalars):
        """The calls of a step of all parameters, or of one, with the gradients of now."""
        self._number()
        lists, stale = self._lists(only)
        if stale:
            self._make_entries(stale)
            lists, stale = self._lists(only)
            if stale:
                raise RuntimeError("the state of %s changes while it is looked at" % self._name(stale[0][1]))
        plans, used, calls = self._plans, {}, []
        for group, steps, entries, *columns in sorted(lists, key=lambda row: row[1][0]):
            turn = 0
            while (id(only), id(group), entries[0].kind, turn) in used:
                turn += 1
            place = id(only), id(group), entries[0].kind, turn
            call = plans.get(place)
            holds = call is not None and call.entries == entries
            if not (holds and call.knows(steps[0])) and any(report.may_skip for report in self._reports):
                self._read_reports(wait=True)  # a new plan begins where the last one is
                return self._calls(only, *scalars)
            if not holds:
                self._tell()
                call = CALLS[columns[0][0].device.type](self, group, entries, call)
            used[place], call.group = call, group
            call.begin(self._options, steps, *columns, *scalars)
            calls.append(call)
        if only is None and used.keys() != plans.keys():
            self._tell()
        self._plans = used if only is None else {**plans, **used}
        return calls

    def _tell(self):
        """Brings the entries up to date, for others than the calls of the last step."""
        for call in self._plans.values():
            call.tell()

    def _number(self):
        """Looks whether the ids are still right."""
        listed = [(list(map(id, group["params"])), list(group.get("param_names", ()))) for group in self.param_groups]
        if listed != self._listed:
            for number, _, p in self._members(self.param_groups):
                if id(p) in self._entries and self._entries[id(p)].number != number:
                    self._lost(id(p))
            self._listed, self._buckets = listed, None

    def _buckets_of(self, only):
        """(group, its parameters, their buckets by kind) of all groups, or of one parameter. Parameters whose entries
        do not hold are of the kind None: their places."""
        if only is not None:
            e = self._entries.get(id(only))
            holds = e is not None and e.key is not None
            kinds = {0: Bucket.cut([(0, id(only), e, e.key)])} if holds else {None: [0]}
            return [(self._member(only)[1], [only], kinds)]
        buckets = self._buckets
        if buckets is None:
            buckets, self._order, seen = [], None, set()
            self._buckets = buckets  # until an entry is lost: even now
            for ids, names in self._listed:
                found = {}
                for place, i in enumerate(ids):
                    if i not in seen:  # one that is listed twice counts once
                        e = self._entries.get(i)
                        key = None if e is None else e.key
                        found.setdefault(key and (e.kind, e.layout), []).append((place, i, e, key))
                        seen.add(i)
                for kind, rows in found.items():
                    if names and kind is not None:  # the ids of a list increase
                        rows.sort(key=lambda row: row[2].number)
                    found[kind] = [row[0] for row in rows] if kind is None else Bucket.cut(rows)
                buckets.append(found)
        return [(group, group["params"], kinds) for group, kinds in zip(self.param_groups, buckets)]

    def _states(self, groups):
        """All states, where the buckets of these groups look for theirs. A tensor's hash is a function in Python: many
        are found by id()."""
        order = list(map(id, self.state))
        if order != self._order:
            self._order, where = order, dict(zip(order, range(len(order))))
            for _, _, kinds in groups:
                for bucket in itertools.chain(*(buckets for kind, buckets in kinds.items() if kind is not None)):
                    bucket.find(where)
        return [*self.state.values(), None]

    def _lists(self, only):
        """What is stepped together: (group, step counts, entries, parameters, gradients, states, addresses of the
        gradients), and pairs of groups and parameters whose entries do not hold."""
        lists, stale, states, groups = [], [], None, self._buckets_of(only)
        for group, params, kinds in groups:
            layout = layout_of(group)
            for kind, buckets in kinds.items():
                if kind is None:
                    stale += [(group, params[i]) for i in buckets if params[i].grad is not None]
                    continue
                columns = [[] for _ in range(6)]
                for bucket in buckets:
                    ps, places = taken(params, bucket.places), None
                    grads = list(map(grad_of, ps))
                    there = [g is not None for g in grads]
                    if not all(there):
                        places = list(itertools.compress(range(len(there)), there))
                        if not places:
                            continue
                        ps, grads = taken(ps, places), taken(grads, places)
                    few = only is not None or 4 * len(ps) < len(there)
                    states = states if few or states else self._states(groups)
                    es, keys, at = bucket.of(places)
                    ss = list(map(self.state.get, ps)) if few else taken(states, at)
                    held = Bucket.hold(es, keys, layout, ps, grads, ss)
                    if held:
                        for column, rows in zip(columns, (held[0], es, ps, grads, ss, held[1])):
                            column += rows
                    else:
                        stale += [(group, p) for e, p, g, s in zip(es, ps, grads, ss)
                                  if not Bucket.hold([e], [[x] for x in e.key or ()], layout, [p], [g], [s])]
                if columns[0]:
                    lists += [(group, *rows) for rows in CALLS[columns[2][0].device.type].lists(*columns)]
        return lists, stale

    def _lost(self, number):
        """An entry no longer holds."""
        self._buckets = None
        if number in self._entries:
            self._entries[number].key = None

    def _make_entries(self, stale):
        """Makes the entries of parameters anew, and gives a state to each that has none."""
        self._tell()
        self._validate()
        for _, p in stale:
            if p.device.type not in CALLS:
                raise TypeError("%s is on %s: use the CPU or a GPU with CUDA" % (self._name(p), p.device))
            if p.dtype not in FORMATS or p.grad.dtype not in FORMATS:
                raise TypeError("%s has a gradient in %s: use bfloat16, float16 or float32 for both (for complex "
                                "numbers: torch.view_as_real)" % (self._name(p), p.grad.dtype))
            if getattr(p.grad, "placements", None) != getattr(p, "placements", None):
                raise TypeError("%s is a DTensor whose gradient has other placements" % self._name(p))
        numbers, wanted = {id(p): number for number, _, p in self._members(self.param_groups)}, {}
        fresh = self._begin((numbers[id(p)], group, p) for group, p in stale)
        for group, p in stale:
            e = self._entries.get(id(p))
            s = self.state[p] if id(p) in fresh else self._state_of(group, p)
            version = e.version if e is not None and e.parameter() is p else None
            try:
                wanted[id(p)] = Entry(group, numbers[id(p)], p, s, version, self._lost)
            except ValueError as fault:
                raise ValueError("the state of %s is refused: %s" % (self._name(p), fault)) from None
        kept = {key: e for key, e in self._entries.items() if e.parameter() is not None}
        self._entries, self._buckets = {**kept, **wanted}, None

    def _begin(self, members):
        """Gives a state to each parameter that has none. Returns their id()s."""
        fresh = [(number, group, p) for number, group, p in members if not self.state.get(p)]
        if fresh:
            self._refuse_shared_memory()
        for number, group, p in fresh:
            s = self.state[p] = begun(group, p)
            if group.get("residual") != "zero" and "residual" in s:
                Host(group, p, s, number=number).draw()
        return {id(p) for _, _, p in fresh}

    def _fitted(self, group, p, s, peer=None):
        try:
            s, extra = (s, None) if peer is None else peers.state_of(peer, group, p, s)
            s = fitted(group, p, s)
            if extra is not None and "residual" in s:
                peers.add_residual(group, p, s, extra)
            return s
        except ValueError as fault:
            raise ValueError("the state of %s is refused: %s" % (self._name(p), fault)) from None

    def _state_of(self, group, p):
        """Its state as a step takes it, or nothing."""
        s = self.state.get(p)
        if s:
            s = self.state[p] = self._fitted(group, p, s)
        return s

    @torch.no_grad()
    def _settle(self):
        """A value that a program has written has no residual."""
        self._read_reports(wait=True)
        self._tell()
        for e in list(self._entries.values()):
            p = e.parameter()
            if p is not None:
                e.settle(local(p), self.state.get(p) or {})

    def _refuse_shared_memory(self):
        members = ((local(p), p) for _, _, p in self._members(self.param_groups))
        spans = sorted((part.data_ptr(), part.data_ptr() + part.numel() * part.element_size(), i, p)
                       for i, (part, p) in enumerate(members)
                       if part.numel() and (part.is_contiguous() or order(part) == part.stride()))
        for (_, end, _, one), (begin, _, _, other) in zip(spans, spans[1:]):
            if begin < end:
                raise RuntimeError("%s and %s share memory: list a tied weight once"
                                   % (self._name(one), self._name(other)))

    def weights_restored(self) -> None:
        """To be called when a program has changed parameters and has set them back to what the last step left, as SAM
        does: the residuals then still belong to them. Otherwise a value that a program writes has none."""
        self._tell()
        for e in list(self._entries.values()):
            p = e.parameter()
            e.version = None if p is None else local(p)._version

    def _gpu(self):
        """A GPU of its parameters, if all are on one."""
        params = {p.device: p for group in self.param_groups for p in group["params"]}
        return next(iter(params), None) if all(map(on_gpu, params.values())) else None

    @torch.no_grad()
    def _measure(self):
        """Whether a gradient is not finite: a tensor on the GPU."""
        refuse_capture()
        calls = self._calls()
        for call in calls:
            call.prepare(max_norm=0.0)
        return add_norms(calls)

    @torch.no_grad()
    def grad_norm(self) -> "k.kopt_norm":
        """The kopt_norm of all gradients: exact, and it counts infinities and NaNs. kahan_opt.kopt_norm_value() makes a
        number of it. Waits for a GPU: KahanScaler.step(), which clips to a norm, does not."""
        norm = k.kopt_norm()
        for call in self._calls():
            call.add_norm(norm)
        return norm

    # ---- state ----

    def state_dict(self) -> Dict[str, Any]:
        """That of torch.optim, with the tensors themselves: torch.save() or deepcopy() it to keep what they are."""
        self._settle()
        everything = self.state
        members = {id(p) for _, _, p in self._members(self.param_groups)}
        self.state = {p: s for p, s in everything.items() if id(p) in members or not isinstance(p, torch.Tensor)}
        try:  # torch.optim fails at the state of a parameter that has left its group
            return super().state_dict()
        finally:
            self.state = everything

    def load_state_dict(self, state_dict: Dict[str, Any]) -> None:
        """Takes what state_dict() made, and also the state of torch.optim.SGD, Adam, AdamW and RAdam, and of optimi,
        FlashOptim, bitsandbytes and torchao. It is checked whole before anything is changed. Tensors that fit are
        taken, not copied. Load the model, too, and before: its weights are not in here."""
        state = {index: Uncast(s) for index, s in state_dict["state"].items() if s}
        super().load_state_dict(dict(state_dict, state=state))

    def __getstate__(self):
        self._settle()
        return super().__getstate__()

    def __setstate__(self, state):
        loaded, peer = "defaults" not in state, {}  # from load_state_dict(); copy and pickle bring all
        if loaded:
            for number, (group, now) in enumerate(zip(state["param_groups"], self.param_groups)):
                if group.get("rule", now["rule"]) != now["rule"]:
                    raise ValueError("the state is that of %s, not of %s" % (group["rule"], now["rule"]))
                for name in WAYS + ("gradient_release",):
                    group.pop(name, None)
                peer[id(group)] = peers.options_of(group, now)
                decoupled = group.pop("decoupled_weight_decay", None)
                if decoupled is not None and decoupled != (now["decay_mode"] != "l2") and "decay_mode" not in group:
                    group["decay_mode"] = "decoupled" if decoupled else "l2"
                    warnings.warn("load_state_dict() sets decay_mode to %r: the state is that of %s (group %d)"
                                  % (group["decay_mode"], "AdamW" if decoupled else "Adam", number))
                for name in ASKED_FOR:
                    if group.get(name, now[name]) != now[name] != defaults_of(now["rule"], {})[name]:
                        warnings.warn("load_state_dict() sets %s to %r, as it was saved, though %r was asked for "
                                      "(group %d)" % (name, group[name], now[name], number))
                group["threads"] = now["threads"]
                for name, value in now.items():  # torch.optim and earlier versions have fewer, as may a program
                    group.setdefault(name, value)
                validate(group, number)
        states = type(state["state"])(dict, state["state"])
        for _, group, p in self._members(state["param_groups"]):
            s = states.get(p)
            if s and loaded:
                states[p] = self._fitted(group, p, s.state if isinstance(s, Uncast) else s, peer[id(group)])
        super().__setstate__(dict(state, state=states))
        self._forget()

    @torch.no_grad()
    def torch_state_dict(self) -> Dict[str, Any]:
        """The state in the layout of torch.optim.SGD, Adam, AdamW or RAdam (exp_avg, exp_avg_sq, step), in fp32."""
        rule = self.defaults["rule"]
        if rule in NOT_IN_TORCH:
            raise ValueError("torch.optim has nothing like " + rule)
        result = self.state_dict()
        for group, packed in zip(self.param_groups, result["param_groups"]):
            for p, index in zip(group["params"], packed["params"]):
                s = self._state_of(group, p)
                if s:
                    step = {} if rule == "sgd" else {"step": torch.tensor(float(s["step"]))}
                    result["state"][index] = dict(step, **self._moments(group, p, s))
        groups = [dict({name: x for name, x in group.items() if name in TORCH or name not in self.defaults},
                       **{} if rule == "sgd" else {"decoupled_weight_decay": group["decay_mode"] != "l2"})
                  for group in result["param_groups"]]
        return {"state": result["state"], "param_groups": groups}

    @staticmethod
    def _moments(group, p, s):
        return {name: Host(group, p, s).read(slot) for slot, name in moments_of(group)}

    @staticmethod
    def _full_weights(group, p, s):
        return Host(group, p, s).read(k.KOPT_SLOT_WEIGHT) if s else local(p).detach().float()

    @torch.no_grad()
    def moments(self, p: Tensor) -> Dict[str, Tensor]:
        """The moments of a parameter as fp32, with the names of torch.optim (exp_avg, exp_avg_sq, ...): copies. Before
        its first step there are none."""
        _, group, p = self._member(p)
        s = self._state_of(group, p)
        return self._moments(group, p, s) if s else {}

    @torch.no_grad()
    def full_weights(self, p: Tensor) -> Tensor:
        """A parameter together with the residual that is kept beside it, as fp32: a copy."""
        self._settle()
        _, group, p = self._member(p)
        return self._full_weights(group, p, self._state_of(group, p))

    def noise_key(self, p: Tensor) -> Dict[str, int]:
        """What the random bits of a parameter's next step are a function of: seed, id and step. For a seed of its own
        put it into a group of its own: {"params": [p], "seed": 7}."""
        self._read_reports(wait=True)
        number, group, p = self._member(p)
        return {"seed": group["seed"], "id": number, "step": int(self.state.get(p, {}).get("step", 0)) + 1}

    @torch.no_grad()
    def read_weights(self) -> List[Tensor]:
        """full_weights() of all parameters, in the order of the groups."""
        self._settle()
        return [self._full_weights(group, p, self._state_of(group, p))
                for _, group, p in self._members(self.param_groups)]

    @torch.no_grad()
    def write_weights(self, weights: Iterable[Tensor]) -> None:
        """Sets the parameters, and what is kept beside them, from fp32 tensors: masters, an average, a checkpoint."""
        members, weights = self._members(self.param_groups), list(weights)
        if [local(p).shape for _, _, p in members] != [local(w).shape for w in weights]:
            raise ValueError("write_weights: not the number of tensors or the shapes of the parameters")
        self._begin([member for member in members if member[2].requires_grad])
        for (_, group, p), values in zip(members, weights):
            if p.requires_grad:
                Host(group, p, self._state_of(group, p)).write(k.KOPT_SLOT_WEIGHT, values)
            else:
                local(p).copy_(values)
        increment_version([local(p) for _, _, p in members])
        self.weights_restored()

    @torch.no_grad()
    def full_state_dict(self, model: torch.nn.Module) -> Dict[str, Any]:
        """model.state_dict() with full weights: fp32, by name. Buffers, and weights of no optimizer, are as there."""
        full = {}
        for (_, _, p), values in zip(self._members(self.param_groups), self.read_weights()):
            if not p.is_floating_point():  # a frozen weight in a format of others
                continue
            full[id(p)] = torch.empty_like(p, dtype=torch.float32, requires_grad=False)  # a DTensor, if p is one
            local(full[id(p)]).copy_(values)
        now = model.state_dict(keep_vars=True)
        return {name: full.get(id(x), x.detach() if isinstance(x, Tensor) else x) for name, x in now.items()}

    @torch.no_grad()
    def load_full_state_dict(self, model: torch.nn.Module, state_dict: Dict[str, Any]) -> None:
        """Loads the model from what full_state_dict() made, and sets what is kept beside its weights."""
        now = model.state_dict(keep_vars=True)
        missing = [name for name in now if name not in state_dict]
        if missing:
            raise KeyError("load_full_state_dict: the state has no " + ", ".join(missing))
        values = {id(x): state_dict[name] for name, x in now.items()}
        weights = [values.get(id(p), full) for (_, _, p), full in zip(
            self._members(self.param_groups), self.read_weights())]
        model.load_state_dict(state_dict)
        self.write_weights(weights)


class KahanAdamW(KahanOptimizer):
    """torch.optim.AdamW, in pure 16 bit. Its options; those without a remark are those of torch.optim:

%s

    foreach and fused: anything; capturable, differentiable: None or False. There is one way to step. Of optimi's
    options kahan_sum, decouple_lr, triton and gradient_release are understood, too."""

    def __init__(self, params: Params, lr: Rate = 1e-3, betas: Tuple[float, float] = (0.9, 0.999), eps: float = 1e-8,
                 weight_decay: float = 1e-2, amsgrad: bool = False, *, maximize: bool = False, rounding: str = "kahan",
                 moment_format: Formats = None, moment_rounding: str = "stochastic",
                 residual_rounding: str = "stochastic", decay_mode: str = "decoupled",
                 max_lr: Optional[float] = None, stable: bool = False, seed: int = 0, threads: Optional[int] = None,
                 residual: Optional[str] = None, **others: Any) -> None:
        super().__init__(params, "adamw", lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, amsgrad=amsgrad,
                         maximize=maximize, rounding=rounding, moment_format=moment_format, seed=seed, threads=threads,
                         moment_rounding=moment_rounding, residual_rounding=residual_rounding, residual=residual,
                         decay_mode=decay_mode, max_lr=max_lr, stable=stable, **others)


class KahanSGD(KahanOptimizer):
    """torch.optim.SGD, in pure 16 bit. Its options; those without a remark are those of torch.optim:

%s

    foreach and fused: anything; differentiable: None or False. There is one way to step. Of optimi's options kahan_sum,
    decouple_wd, decouple_lr, triton and gradient_release are understood, too."""

    def __init__(self, params: Params, lr: Rate = 1e-3, momentum: float = 0.0, dampening: float = 0.0,
                 weight_decay: float = 0.0, nesterov: bool = False, *, maximize: bool = False, rounding: str = "kahan",
                 moment_format: Formats = None, moment_rounding: str = "stochastic",
                 residual_rounding: str = "stochastic", decay_mode: str = "l2", max_lr: Optional[float] = None,
                 seed: int = 0, threads: Optional[int] = None, residual: Optional[str] = None, **others: Any) -> None:
        super().__init__(params, "sgd", lr=lr, momentum=momentum, dampening=dampening, weight_decay=weight_decay,
                         nesterov=nesterov, maximize=maximize, rounding=rounding, moment_format=moment_format,
                         moment_rounding=moment_rounding, residual_rounding=residual_rounding,
                         decay_mode=decay_mode, max_lr=max_lr, seed=seed, threads=threads, residual=residual, **others)


for _class, _rule in ((KahanAdamW, "adamw"), (KahanSGD, "sgd")):
    if _class.__doc__:  # not under python -OO
        _class.__doc__ %= described_options(_rule)


# what torch.amp.GradScaler calls the fields of kopt_scaler, in its arguments and in its state_dict()
SCALER_FIELDS = {"init_scale": "scale", "growth_factor": "growth", "backoff_factor": "backoff",
                 "growth_interval": "interval", "_growth_tracker": "good"}


class KahanScaler:
    """kopt_scaler with the calls of torch.amp.GradScaler: of several optimizers each skips its own overflows, and one
    in any of them lowers the scale, once in update(). No pass writes before the step. fields: init_scale (65536),
    growth_factor (2), backoff_factor (.5), growth_interval (2000) and others of kopt_scaler. Not enabled, it scales
    nothing and looks for nothing. The device of a GradScaler is accepted and not needed.

    For parameters on a GPU the scale stays there, and so does the answer whether a step was skipped: scale(), step()
    and update() do not wait for it. skipped, get_scale() and state_dict() do. The step counts in the states of an
    optimizer take a skipped step back in a later step(), or in its state_dict()."""

    def __init__(self, device: Any = None, *, enabled: bool = True, **fields: float) -> None:
        self._host, self._there = k.kopt_scaler_of(), None  # what is there, on a GPU, is newer: scale, good, bad
        self.seen: Dict[int, Any] = {}  # since the last update(), by id(): is it stepped, overflows
        self.enabled, self._skipped = enabled, False
        self.load_state_dict(fields)

    @property
    def scaler(self) -> "k.kopt_scaler":
        """The kopt_scaler, whose fields a program may set. Waits for the GPU, if the scale is there."""
        if self._there is not None:
            self._host.scale, good, bad = self._there.tolist()
            self._host.good, self._host.bad, self._there = int(good), int(bad), None
        return self._host

    @property
    def skipped(self) -> bool:
        """Did the last step() leave the step out?"""
        return bool(self._skipped)

    def _scale_on(self, device):
        """The scale as a tensor, which from now on is newer than that of the host."""
        if self._there is None:
            values = [self._host.scale, self._host.good, self._host.bad]
            self._there = torch.tensor(values, dtype=torch.float64, device=device)
        return self._there[0].to(device, torch.float32)

    def __repr__(self) -> str:
        return "KahanScaler(%s)" % ", ".join("%s=%r" % field for field in self.state_dict().items())

    def is_enabled(self) -> bool:
        """Does it scale?"""
        return self.enabled

    def get_scale(self) -> float:
        """The scale: 1 if it is not enabled."""
        return float(self.scaler.scale) if self.enabled else 1.0

    def scale(self, loss: Any) -> Any:
        """The loss times the scale, in fp32: for backward(). A list or tuple of losses, also nested: each of them."""
        if isinstance(loss, (list, tuple)):
            return type(loss)(map(self.scale, loss))
        if not self.enabled:
            return loss
        return loss.float() * (self._host.scale if self._there is None else self._scale_on(loss.device))

    @torch.no_grad()
    def unscale_(self, optimizer: KahanOptimizer) -> None:
        """Divides the gradients by the scale, for a program that needs their values. step() alone is faster."""
        self._refuse_others(optimizer)
        if not self.enabled:
            return
        if id(optimizer) in self.seen:
            raise RuntimeError("unscale_() is being called after step()." if self.seen[id(optimizer)][0] else
                               "unscale_() has already been called on this optimizer since the last update().")
        grads = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        if any(g.dtype == torch.float16 for g in grads):
            raise ValueError("Attempting to unscale FP16 gradients, which would lose small ones: to clip, pass "
                             "max_norm to step()")
        if optimizer._gpu():
            self.seen[id(optimizer)] = False, optimizer._measure()
            for g in grads:
                g.copy_(g.float() * (1.0 / self._scale_on(g.device).double()).float())
            return
        self.seen[id(optimizer)] = False, optimizer.grad_norm().nonfinite != 0
        for g in grads:
            g.mul_(1.0 / self.scaler.scale)

    @staticmethod
    def _refuse_others(optimizer):
        if not isinstance(optimizer, KahanOptimizer):
            raise TypeError("KahanScaler steps KahanAdamW, KahanSGD and the like; for %s there is torch.amp.GradScaler"
                            % type(optimizer).__name__)

    def step(self, optimizer: KahanOptimizer, max_norm: float = 0.0) -> Any:
        """Steps unless a gradient is infinite or NaN. max_norm: clips the norm of the optimizer's gradients to it; 0 or
        infinity: does not."""
        self._refuse_others(optimizer)
        if self.enabled and all(p.grad is None for group in optimizer.param_groups for p in group["params"]):
            raise RuntimeError("no parameter has a gradient: with gradient release there is no loss scale")
        max_norm = 0.0 if max_norm is None or max_norm == float("inf") else max_norm
        stepped, found = self.seen.get(id(optimizer), (False, False))
        if stepped:
            raise RuntimeError("step() has already been called since the last update().")
        scaled, there = self.enabled and id(optimizer) not in self.seen, optimizer._gpu()
        measured = self.enabled or max_norm
        if there:
            optimizer.grad_scale = self._scale_on(there) if scaled else None
            optimizer.found_inf, optimizer.max_norm = found, max_norm if measured else None
        else:
            scale = self.get_scale() if scaled else 1.0
            norm = optimizer.grad_norm() if measured else k.kopt_norm()
            found = bool(found) or norm.nonfinite != 0
            optimizer.clip = 1.0 if found else k.kopt_norm_clip(norm, max_norm, 1.0 / scale)
            optimizer.grad_scale, optimizer.found_inf = scale, found
        try:
            loss = optimizer.step()
            found = getattr(optimizer, "overflow", False) | found
        finally:
            for name in ("clip", "grad_scale", "found_inf", "max_norm", "overflow"):
                optimizer.__dict__.pop(name, None)
        self._skipped = found
        if self.enabled:
            self.seen[id(optimizer)] = True, found
        return loss

    def update(self) -> None:
        """Lowers the scale after an overflow, and raises it after growth_interval steps without one."""
        if not self.enabled:
            return
        if not self.seen:
            raise AssertionError("No inf checks were recorded prior to update.")
        found = [found for _, found in self.seen.values()]
        there = [x for x in found if isinstance(x, Tensor)]
        if there:
            self._update_there(functools.reduce(operator.or_, (x.to(there[0].device) for x in there))
                               | any(x is True for x in found))
        else:
            k.check(k.kopt_scaler_update(self.scaler, int(any(found))))
        self.seen = {}

    def _update_there(self, found):
        """kopt_scaler_update(), on a GPU. found: a tensor."""
        h, none = self._host, (~found).double()
        k.check(k.kopt_scaler_update(type(h).from_buffer_copy(h), 0))  # are its fields right?
        self._scale_on(found.device)
        scale, good, bad = self._there.to(found.device)
        good, bad = (good + 1) * none, (bad + 1) * (1 - none)
        less, more = scale * h.backoff, scale * h.growth
        less = torch.where(less < 2.0 ** -126, scale, less.float().double()).clamp(min=h.minimum)
        more = torch.where(more < 2.0 ** 128 - 2.0 ** 103, more.float().double(), scale)
        raised = good >= h.interval
        scale = torch.where(found & (bad >= h.hysteresis), less, torch.where(raised, more, scale))
        self._there = torch.stack([scale, good * (~raised).double(), bad])

    def state_dict(self) -> Dict[str, float]:
        """That of GradScaler, which takes it, with the other fields of kopt_scaler; nothing, if it is not enabled."""
        names = {field: name for name, field in SCALER_FIELDS.items() if field != "scale"}
        return {names.get(name, name): getattr(self.scaler, name) for name, _ in self.scaler._fields_ if self.enabled}

    def load_state_dict(self, state: Dict[str, float]) -> None:
        """Takes what state_dict() made, also that of GradScaler or of a version before 0.9."""
        names = {name for name, _ in self.scaler._fields_}
        wanted = type(self.scaler).from_buffer_copy(self.scaler)
        for name, value in state.items():
            if SCALER_FIELDS.get(name, name) not in names:
                raise TypeError("KahanScaler has no %r, but init_scale, growth_factor, backoff_factor, "
                                "growth_interval, minimum and hysteresis" % name)
            setattr(wanted, SCALER_FIELDS.get(name, name), value)
        if k.kopt_scaler_update(type(wanted).from_buffer_copy(wanted), 0) != k.KOPT_OK:
            raise ValueError("init_scale: above 0; growth_factor: above 1; backoff_factor: between 0 and 1; "
                             "growth_interval: at least 1; all finite; not %r" % (state,))
        self._host, self._there = wanted, None


def param_groups_weight_decay(model: torch.nn.Module, weight_decay: float = 1e-2,
                              additional_layers: Optional[Iterable[str]] = None) -> List[Dict[str, Any]]:
    """Two groups of a model's parameters: without weight decay those of one dimension (biases, norms) and those whose
    name contains a word of additional_layers, with weight_decay the others."""
    if isinstance(additional_layers, str):
        raise TypeError("additional_layers is a list of words: [%r]" % additional_layers)
    words, kept, decayed = list(additional_layers or ()), [], []
    for name, p in model.named_parameters():
        if p.requires_grad:
            small = p.ndim <= 1 or name.endswith(".bias") or any(word in name for word in words)
            (kept if small else decayed).append(p)
    return [{"params": kept, "weight_decay": 0.0}, {"params": decayed, "weight_decay": weight_decay}]


_hooks: "weakref.WeakKeyDictionary[Any, Any]" = weakref.WeakKeyDictionary()  # not in the model, which can be saved


def prepare_for_gradient_release(model: torch.nn.Module, optimizer: KahanOptimizer,
                                 ignore_existing_hooks: bool = False) -> None:
    """From now on backward() steps each parameter of the optimizer as soon as its gradient is there, and frees the
    gradient. step() and zero_grad() find nothing to do then. Needs PyTorch 2.1."""
    params = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    if not all(hasattr(p, "register_post_accumulate_grad_hook") for p in params):
        raise RuntimeError("gradient release needs PyTorch 2.1 or later")
    members = {id(p) for p in model.parameters()}
    if not all(id(p) in members for p in params):
        raise ValueError("the optimizer has parameters that are not in the model")
    if not ignore_existing_hooks and any(getattr(p, "_post_accumulate_grad_hooks", None) for p in params):
        raise ValueError("the model has such hooks already: pass ignore_existing_hooks=True if they may stay")

    def release(p):
        optimizer.step(param=p)
        optimizer.zero_grad(param=p)

    _hooks[model] = [p.register_post_accumulate_grad_hook(release) for p in params]


def remove_gradient_release(model: torch.nn.Module) -> None:
    """backward() keeps gradients again."""
    hooks = _hooks.pop(model, None)
    if hooks is None:
        warnings.warn("the model has no hooks of prepare_for_gradient_release()")
    for hook in hooks or ():
        hook.remove()
