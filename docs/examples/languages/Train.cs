// Train.cs - the header called from C#, by P/Invoke.
using System;
using System.Runtime.InteropServices;

static unsafe class Train {
    const string Library = "kahan_opt";

    const int Version = 1500, AdamW = 64, Bf16 = 1;

    [StructLayout(LayoutKind.Explicit, Size = 256)]
    struct Optimizer { // the fields that are used here
        [FieldOffset(72)] public double lr;
        [FieldOffset(88)] public double weight_decay;
    }
    [StructLayout(LayoutKind.Explicit, Size = 128)]
    struct Tensor { // zeros elsewhere are the defaults
        [FieldOffset(0)] public void *weight;
        [FieldOffset(8)] public void *grad;
        [FieldOffset(24)] public void *state;
        [FieldOffset(32)] public UIntPtr state_size;
        [FieldOffset(40)] public UIntPtr n;
        [FieldOffset(64)] public int weight_format;
        [FieldOffset(68)] public int grad_format;
    }

    [DllImport(Library)] static extern int kopt_optimizer_init(out Optimizer opt, int rule, double lr, int version,
                                                               UIntPtr opt_size, UIntPtr tensor_size);
    [DllImport(Library)] static extern UIntPtr kopt_state_size(ref Optimizer opt, ref Tensor t);
    [DllImport(Library)] static extern int kopt_state_init(ref Optimizer opt, ref Tensor tensors, UIntPtr count,
                                                           float *weights);
    [DllImport(Library)] static extern int kopt_optimizer_step(ref Optimizer opt, ref Tensor tensors, UIntPtr count);
    [DllImport(Library)] static extern sbyte *kopt_result_string(int result);
    [DllImport(Library)] static extern long kopt_layout_of(string name);

    static void Check(int result) { if (result != 0) throw new Exception(new string(kopt_result_string(result))); }
    static void Expect<Struct>(string field, string name) { // is the field where the library has it?
        if (kopt_layout_of(name) != (long)Marshal.OffsetOf(typeof(Struct), field))
            throw new Exception(name + " is at " + kopt_layout_of(name));
    }

    static void Main() {
        Expect<Optimizer>("weight_decay", "kopt_optimizer.weight_decay: double");
        Expect<Tensor>("weight_format", "kopt_tensor.weight_format: kopt_format");
        Optimizer opt;
        Check(kopt_optimizer_init(out opt, AdamW, 1e-3, Version, (UIntPtr)sizeof(Optimizer), (UIntPtr)sizeof(Tensor)));
        opt.weight_decay = 0.1;
        var t = new Tensor { n = (UIntPtr)1000, weight_format = Bf16, grad_format = Bf16 };
        var weight = new ushort[1000];
        var grad = new ushort[1000];
        var state = new byte[(int)kopt_state_size(ref opt, ref t)];
        for (int i = 0; i < 1000; i++) grad[i] = 0x3F80; // 1 in bf16
        fixed (ushort *w = weight, g = grad)
        fixed (byte *s = state) { // the arrays stay where they are as long as the tensor points to them
            t.weight = w;
            t.grad = g;
            t.state = s;
            t.state_size = (UIntPtr)state.Length;
            Check(kopt_state_init(ref opt, ref t, (UIntPtr)1, null));
            for (int i = 0; i < 100; i++) Check(kopt_optimizer_step(ref opt, ref t, (UIntPtr)1));
        }
        Console.WriteLine("C#     {0:x4} {1:x4} {2:x4}", weight[0], weight[1], weight[999]);
    }
}
