// train.rs - the header called from Rust.
use std::ffi::{CStr, CString};
use std::os::raw::{c_char, c_int, c_void};

// Large structs travel through memory, so a C compiler and Rust need to agree on their size and alignment only.
#[repr(C, align(8))]
#[derive(Clone, Copy)]
struct Optimizer([u8; 200]);
#[repr(C, align(8))]
struct Tensor([u8; 96]);

extern "C" {
    fn kopt_adamw(lr: f64) -> Optimizer;
    fn kopt_tensor_of(weight: *mut u16, grad: *mut u16, format: c_int, n: usize, state: *mut c_void, size: usize)
        -> Tensor;
    fn kopt_state_size(opt: *const Optimizer, n: usize) -> usize;
    fn kopt_state_init(opt: *const Optimizer, t: *const Tensor, weights: *const f32) -> c_int;
    fn kopt_optimizer_step(opt: *mut Optimizer, tensors: *const Tensor, count: usize) -> c_int;
    fn kopt_result_string(result: c_int) -> *const c_char;
    fn kopt_layout_of(name: *const c_char) -> i64;
}

fn layout(name: &str) -> usize { // the size of a struct, or the offset of a field
    unsafe { kopt_layout_of(CString::new(name).unwrap().as_ptr()) }.try_into().expect(name)
}
fn check(result: c_int) {
    assert!(result == 0, "{}", unsafe { CStr::from_ptr(kopt_result_string(result)) }.to_string_lossy());
}

fn main() {
    assert_eq!(layout("sizeof kopt_optimizer"), std::mem::size_of::<Optimizer>());
    assert_eq!(layout("sizeof kopt_tensor"), std::mem::size_of::<Tensor>());
    let mut weight = vec![0u16; 1000];
    let mut grad = vec![0x3F80u16; 1000]; // 1 in bf16
    unsafe {
        let mut opt = kopt_adamw(1e-3);
        let decay = layout("kopt_optimizer.weight_decay: double");
        opt.0[decay..decay + 8].copy_from_slice(&0.1f64.to_ne_bytes());
        let mut state = vec![0u8; kopt_state_size(&opt, weight.len())];
        let (n, size) = (weight.len(), state.len());
        let t = kopt_tensor_of(weight.as_mut_ptr(), grad.as_mut_ptr(), 1, n, state.as_mut_ptr().cast(), size);
        check(kopt_state_init(&opt, &t, std::ptr::null()));
        for _ in 0..100 { check(kopt_optimizer_step(&mut opt, &t, 1)); }
    }
    println!("Rust   {:04x} {:04x} {:04x}", weight[0], weight[1], weight[999]);
}
