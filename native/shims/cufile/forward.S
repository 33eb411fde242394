/* Every function that libcufile 1.20 exports and calls.c and batch.c do not have: a jump to the real one, whatever its arguments are. The
 * first call of each looks it up; kvfs_cufile_symbol() is in real.c. Data and the C++ library's templates are left out. */

    .section .note.GNU-stack, "", %progbits

#if defined(__x86_64__)
    .macro JUMP name
    .text
    .globl \name
    .type \name, @function
    .balign 16
\name:
    endbr64
    jmp *.Lslot_\name(%rip)
.Lfirst_\name:
    endbr64
    leaq .Lname_\name(%rip), %rax
    leaq .Lslot_\name(%rip), %r11
    jmp .Lresolve
    .size \name, . - \name
    .data
    .balign 8
.Lslot_\name: .quad .Lfirst_\name
    .section .rodata
.Lname_\name: .asciz "\name"
    .endm

    .text
/* rax: name; r11: slot. On entry as any function is: the return address on the stack, arguments in registers. */
.Lresolve:
    .cfi_startproc
    pushq %rdi
    pushq %rsi
    pushq %rdx
    pushq %rcx
    pushq %r8
    pushq %r9
    pushq %r11
    subq $128, %rsp
    .cfi_adjust_cfa_offset 184
    movups %xmm0, 0(%rsp)
    movups %xmm1, 16(%rsp)
    movups %xmm2, 32(%rsp)
    movups %xmm3, 48(%rsp)
    movups %xmm4, 64(%rsp)
    movups %xmm5, 80(%rsp)
    movups %xmm6, 96(%rsp)
    movups %xmm7, 112(%rsp)
    movq %rax, %rdi
    call kvfs_cufile_symbol@PLT
    movups 0(%rsp), %xmm0
    movups 16(%rsp), %xmm1
    movups 32(%rsp), %xmm2
    movups 48(%rsp), %xmm3
    movups 64(%rsp), %xmm4
    movups 80(%rsp), %xmm5
    movups 96(%rsp), %xmm6
    movups 112(%rsp), %xmm7
    addq $128, %rsp
    popq %r11
    popq %r9
    popq %r8
    popq %rcx
    popq %rdx
    popq %rsi
    popq %rdi
    .cfi_adjust_cfa_offset -184
    movq %rax, (%r11)
    movq %rax, %r11
    xorl %eax, %eax
    jmp *%r11
    .cfi_endproc

#elif defined(__aarch64__)
    .macro JUMP name
    .text
    .globl \name
    .type \name, %function
    .balign 16
\name:
    hint #34 /* bti c */
    adrp x16, .Lslot_\name
    ldr x16, [x16, :lo12:.Lslot_\name]
    br x16
.Lfirst_\name:
    hint #36 /* bti j */
    adrp x16, .Lname_\name
    add x16, x16, :lo12:.Lname_\name
    adrp x17, .Lslot_\name
    add x17, x17, :lo12:.Lslot_\name
    b .Lresolve
    .size \name, . - \name
    .data
    .balign 8
.Lslot_\name: .quad .Lfirst_\name
    .section .rodata
.Lname_\name: .asciz "\name"
    .endm

    .text
/* x16: name; x17: slot. */
.Lresolve:
    .cfi_startproc
    stp x29, x30, [sp, #-224]!
    .cfi_adjust_cfa_offset 224
    stp x0, x1, [sp, #16]
    stp x2, x3, [sp, #32]
    stp x4, x5, [sp, #48]
    stp x6, x7, [sp, #64]
    stp x8, x17, [sp, #80]
    stp q0, q1, [sp, #96]
    stp q2, q3, [sp, #128]
    stp q4, q5, [sp, #160]
    stp q6, q7, [sp, #192]
    mov x0, x16
    bl kvfs_cufile_symbol
    mov x16, x0
    ldp x0, x1, [sp, #16]
    ldp x2, x3, [sp, #32]
    ldp x4, x5, [sp, #48]
    ldp x6, x7, [sp, #64]
    ldp x8, x17, [sp, #80]
    ldp q0, q1, [sp, #96]
    ldp q2, q3, [sp, #128]
    ldp q4, q5, [sp, #160]
    ldp q6, q7, [sp, #192]
    ldp x29, x30, [sp], #224
    .cfi_adjust_cfa_offset -224
    str x16, [x17]
    br x16
    .cfi_endproc

#else
#error "libkvfs_cufile: no jumps for this machine"
#endif

    JUMP cuFileCopyGpu
    JUMP cuFileCopyGpuPosixIORetry
    JUMP cuFileCopyGpuWrap
    JUMP cuFileCopyGpuWrapPosixIORetry
    JUMP cuFileDriverGetP2PFlags
    JUMP cuFileDriverSetMaxCacheSize
    JUMP cuFileDriverSetMaxDirectIOSize
    JUMP cuFileDriverSetMaxPinnedMemSize
    JUMP cuFileDriverSetP2PFlags
    JUMP cuFileDriverSetPollMode
    JUMP cuFileExportPCIeTopology
    JUMP cuFileGetBARSizeInKB
    JUMP cuFileGetParameterBool
    JUMP cuFileGetParameterGpuBounceBufferSlabArray
    JUMP cuFileGetParameterMinMaxValue
    JUMP cuFileGetParameterPosixPoolSlabArray
    JUMP cuFileGetParameterSizeT
    JUMP cuFileGetParameterString
    JUMP cuFileGetStatsL1
    JUMP cuFileGetStatsL2
    JUMP cuFileGetStatsL3
    JUMP cuFileGetStatsLevel
    JUMP cuFileGpuWaitValue32
    JUMP cuFileInlineGpu
    JUMP cuFileObjectDriverOpen
    JUMP cuFileObjectDriverOpenForDiagnostics
    JUMP cuFileObjectInitialize
    JUMP cuFileSetParameterBool
    JUMP cuFileSetParameterGpuBounceBufferSlabArray
    JUMP cuFileSetParameterPosixPoolSlabArray
    JUMP cuFileSetParameterSizeT
    JUMP cuFileSetParameterString
    JUMP cuFileSetStatsLevel
    JUMP cuFileSparseGpu
    JUMP cuFileStatsReset
    JUMP cuFileStatsStart
    JUMP cuFileStatsStop
    JUMP cuFileStreamHandleInline
    JUMP cuFileStreamHandleSparse
    JUMP cuFileStreamWaitValue32
    JUMP _Z15cuFileLoggerDbgPKcS0_
    JUMP _Z15cuFileLoggerErrPKcS0_
    JUMP _Z16cuFileLoggerInfoPKcS0_
    JUMP _Z16cuFileLoggerWarnPKcS0_
    JUMP _Z17cuFileLoggerTracePKcS0_
    JUMP _Z18cuFileLoggerNoticePKcS0_
    JUMP _Z19cuFileGetRDMAPDListP16cuFileRDMAPDInfoi
    JUMP _Z20cuFileRDMADescStrGetPKvmm12CUfileOpcodePPc
    JUMP _Z20cuFileRDMADescStrPutPc
    JUMP _Z23cuFileRDMADescStrGet_v2PKvmm12CUfileOpcodePPc
    JUMP _Z23cuFileRDMADescStrPut_v2Pci
    JUMP _Z40__device_stub__Z20cuFileGpuWaitValue32yjyj
    JUMP _Z47__device_stub__Z13cuFileCopyGpuP13gpu_copy_in_sP13gpu_copy_in_s
    JUMP _Z49__device_stub__Z15cuFileInlineGpuP13gpu_meta_in_sP13gpu_meta_in_s
    JUMP _Z49__device_stub__Z15cuFileSparseGpuP13gpu_meta_in_sP13gpu_meta_in_s
    JUMP _Z59__device_stub__Z25cuFileCopyGpuPosixIORetryP13gpu_copy_in_sP13gpu_copy_in_s
    JUMP _ZN10cuFileInfo19cuFileGetBufferSizeEPv
    JUMP _ZN10cuFileInfo19cuFileGetMemoryTypeEPKv
    JUMP _ZN11cuFileStats17GetPluginInstanceEv
    JUMP _ZN11cuFileStats19IsPluginInitializedEv
    JUMP _ZN11cuFileStats8GetLevelEv
    JUMP _ZN11cuFileStats8SetLevelEi
    JUMP _ZN9CUFileDrv10GetVersionEv
    JUMP _ZN9CUFileDrv15ReadVersionInfoEb
    JUMP _ZN9CUFileDrv16GetVersionStringB5cxx11Ej
    JUMP _ZN9CUFileDrv9UseDriverEv
